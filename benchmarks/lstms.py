"""Compare the training of LSTMs: DeepLog and a bidirectional language model.

    python -m benchmarks.lstms
    python -m benchmarks.lstms --small --turns 1

flatout is compared with loops like those of public implementations, with `nn.LSTM` and
Adam, but with all data on the device instead of a slow DataLoader. Sessions and words
are random, because their values do not affect throughput.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import training
from benchmarks.harness import Figures, Script, main
from benchmarks.training import DEVICE, FIRST_ID, IS_CUDA, Shape, Stopwatch

WINDOW = 10
"""Number of preceding keys from which DeepLog predicts the next one."""
KEYS = 29
DEEPLOG = Shape(
    {
        "model_type": "log_key_lstm",
        "vocab_size": KEYS + FIRST_ID,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "max_position_embeddings": None,
        "window_keys": WINDOW,
    },
    batch=64,
    mean_tokens=20,
    longest=64,
    steps=200,
    warm_steps=40,
)
BILM = Shape(
    {
        "model_type": "bilm",
        "vocab_size": 30_000,
        "embedding_size": 512,
        "hidden_size": 2_048,
        "projection_size": 512,
        "num_hidden_layers": 2,
        "dropout": 0.1,
    },
    batch=128,
    mean_tokens=100_000,  # every row is a full block, as in the plain loop
    longest=128,
    steps=50,
    warm_steps=10,
)


def shape_of(given: argparse.Namespace) -> Shape:
    shape = {"DeepLog": DEEPLOG, "bidirectional language model": BILM}[given.case]
    if not given.small:
        return shape
    few: dict[str, Any] = {"steps": 6, "warm_steps": 3, "batch": 16}
    if shape is BILM:
        sizes = {"embedding_size": 32, "hidden_size": 64, "projection_size": 32}
        config = {**BILM.config, **sizes, "vocab_size": 1_000}
        return replace(BILM, config=config, longest=32, **few)
    return replace(DEEPLOG, **few)


def _tokens(shape: Shape, found: Figures, each: float) -> Figures:
    """Return the metrics in `found` with samples/s converted to tokens/s. `each` is the
    number of tokens per sample."""
    rate = found.pop("samples_per_s") * each
    return {"tokens_per_s": rate, **found}


def flatout(given: argparse.Namespace) -> Figures:
    shape = shape_of(given)
    causal = given.case == "DeepLog"
    table = training.token_table(shape)
    task = "next-key" if causal else "bidirectional-lm"
    mean = len(table["input_ids"].combine_chunks().values) / len(table)
    train = {"weight_decay": 0.0, "learning_rate": 5e-3, "compile": False}
    # The first key of a session is not predicted.
    return _tokens(shape, training.flatout(shape, task, table, **train), mean - 1)


class WindowModel(nn.Module):
    """DeepLog as in public implementations. It maps windows of key numbers (B, T, 1) to
    the logits of the next key (B, keys)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 64, 2, batch_first=True)
        self.head = nn.Linear(64, KEYS)

    def forward(self, windows: Tensor) -> Tensor:
        return self.head(self.lstm(windows)[0][:, -1])


def deeplog_loop(given: argparse.Namespace) -> Figures:
    """Return the keys/s of a plain loop over windows of 10 keys. Each step predicts
    about the number of keys of a step of flatout, all of them after a full window."""
    shape = shape_of(given)
    column = training.token_table(shape)["input_ids"].combine_chunks()
    ids, bounds = column.values.to_numpy(), column.offsets.to_numpy()
    starts = [
        at for begin, end in pairwise(bounds) for at in range(begin, end - WINDOW)
    ]
    places = torch.tensor(starts)
    keys = torch.from_numpy(ids - FIRST_ID)
    windows = keys[places[:, None] + torch.arange(WINDOW)].float().unsqueeze(-1)
    data, labels = windows.to(DEVICE), keys[places + WINDOW].long().to(DEVICE)
    batch = shape.batch * (len(ids) // (len(bounds) - 1) - 1)
    model = WindowModel().to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    watch = Stopwatch(replace(shape, batch=batch))
    while True:
        for rows in torch.randperm(len(places), device=DEVICE).split(batch)[:-1]:
            loss = nn.functional.cross_entropy(model(data[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if watch.step():
                return _tokens(shape, watch.figures(), 1.0)


class Bilm(nn.Module):
    """Bidirectional language model. For words (B, T), it returns two tensors of states
    (B, T, projection size): one for the next word and one for the previous word."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        words, width = config["vocab_size"], config["embedding_size"]
        given: dict[str, Any] = {"batch_first": True, "dropout": config["dropout"]}
        given["proj_size"] = config["projection_size"]
        sizes = (width, config["hidden_size"], config["num_hidden_layers"])
        self.embed = nn.Embedding(words, width)
        self.onward, self.back = nn.LSTM(*sizes, **given), nn.LSTM(*sizes, **given)
        self.drop = nn.Dropout(config["dropout"])
        self.head = nn.Linear(config["projection_size"], words, bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        onward = self.onward(self.drop(self.embed(ids)))[0]
        back = self.back(self.drop(self.embed(ids.flip(1))))[0].flip(1)
        return onward, back

    def loss(self, onward: Tensor, back: Tensor, ids: Tensor) -> Tensor:
        """Return the sum of the mean losses of both directions."""
        losses = [
            nn.functional.cross_entropy(
                self.head(self.drop(states)).flatten(0, 1), words.flatten()
            )
            for states, words in (
                (onward[:, :-1], ids[:, 1:]),
                (back[:, 1:], ids[:, :-1]),
            )
        ]
        return sum(losses, torch.zeros((), device=ids.device))


def bilm_loop(given: argparse.Namespace) -> Figures:
    """Return the tokens/s of a plain loop over blocks of words."""
    shape = shape_of(given)
    config, length = shape.config, shape.longest
    chance = torch.Generator().manual_seed(0)
    count = 40 * shape.batch
    words = torch.randint(FIRST_ID, shape.vocabulary, (count, length), generator=chance)
    words = words.to(DEVICE)
    model = Bilm(config).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, fused=True)
    watch, loss_of = Stopwatch(shape), model.loss
    if IS_CUDA:
        loss_of = torch.compile(loss_of)
    while True:
        for rows in torch.randperm(count, device=DEVICE).split(shape.batch):
            ids = words[rows]
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=IS_CUDA):
                loss = loss_of(*model(ids), ids)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if watch.step():
                return _tokens(shape, watch.figures(), length)


SCRIPT = Script(
    "benchmarks.lstms",
    "LSTMs compared with plain loops",
    {
        "DeepLog": {"flatout": flatout, "plain loop": deeplog_loop},
        "bidirectional language model": {"flatout": flatout, "plain loop": bilm_loop},
    },
    figure="tokens_per_s",
)

if __name__ == "__main__":
    raise SystemExit(main(SCRIPT))
