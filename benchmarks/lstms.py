"""Compare the training of LSTMs: DeepLog and a bidirectional language model.

    python -m benchmarks.lstms
    python -m benchmarks.lstms --small --turns 1

flatout is compared with a loop like those of public implementations, with `nn.LSTM`, a
DataLoader and Adam. Sessions and words are random, because their values do not affect
throughput.
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
    warm_steps=20,
)
DEEPLOG_BATCH = 2_048
"""Number of windows per step in the plain loop, as in public implementations."""
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
    steps=10,
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
        return replace(BILM, config=config, mean_tokens=32, longest=32, **few)
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
    """Return the keys/s of a plain loop over windows of 10 keys."""
    shape = shape_of(given)
    column = training.token_table(shape)["input_ids"].combine_chunks()
    ids, bounds = column.values.to_numpy(), column.offsets.to_numpy()
    starts = [
        at for begin, end in pairwise(bounds) for at in range(begin, end - WINDOW)
    ]
    places = torch.tensor(starts)
    keys = torch.from_numpy(ids - FIRST_ID)
    windows = keys[places[:, None] + torch.arange(WINDOW)].float().unsqueeze(-1)
    data = torch.utils.data.TensorDataset(windows, keys[places + WINDOW].long())
    batch = min(DEEPLOG_BATCH, len(places) // 4)
    loader = torch.utils.data.DataLoader(data, batch, shuffle=True, drop_last=True)
    model = WindowModel().to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters())
    watch = Stopwatch(replace(shape, batch=batch))
    while True:
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(
                model(inputs.to(DEVICE)), labels.to(DEVICE)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
            if watch.step():
                return _tokens(shape, watch.figures(), 1.0)


class Bilm(nn.Module):
    """Bidirectional language model. For words (B, T), it returns two tensors of logits
    (B, T, words): one for the next word and one for the previous word."""

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
        return self.head(self.drop(onward)), self.head(self.drop(back))


def bilm_loop(given: argparse.Namespace) -> Figures:
    """Return the tokens/s of a plain loop over blocks of words."""
    shape = shape_of(given)
    config, length = shape.config, shape.longest
    chance = torch.Generator().manual_seed(0)
    count = 40 * shape.batch
    words = torch.randint(FIRST_ID, shape.vocabulary, (count, length), generator=chance)
    loader = torch.utils.data.DataLoader(words, shape.batch, shuffle=True)
    model = Bilm(config).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, fused=True)
    watch, cross = Stopwatch(shape), nn.functional.cross_entropy
    while True:
        for batch in loader:
            ids = batch.to(DEVICE)
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=IS_CUDA):
                onward, back = model(ids)
                forward = cross(onward[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
                behind = cross(back[:, 1:].flatten(0, 1), ids[:, :-1].flatten())
            optimizer.zero_grad()
            (forward + behind).backward()
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
