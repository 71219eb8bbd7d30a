# ruff: noqa: T201
"""flatout's bidirectional language model beside a loop as one writes it by hand.

Both sides begin at the same weights and train on the same blocks of whole words:
wikitext-2's `valid.txt`, as PyTorch's examples (word_language_model) hold it. Both are
judged by `test.txt`. The loop is `nn.LSTM`, AdamW and a linear decay, and is given the
same blocks at each step; dropout is drawn by each side, so that they differ by rounding
alone where it is 0. A run is a process of its own, the sides by turns. `cpu_s` is what
all of it costs, also where others use the cores.

    python -m tests.tools.bilm_plain --folder=/data/wikitext-2 --epochs=2 --turns=2
    python -m tests.tools.bilm_plain --folder=/data/wikitext-2 --epochs=20 \
        --device=cuda --precision=bf16 --batch=128 --length=128 --width=512 \
        --cells=2048 --projection=512 --vocabulary=30000
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor, nn

UNKNOWN, END = 1, 2
Split = list[list[int]]


def blocks(folder: Path, length: int, most_words: int) -> dict[str, Split]:
    """Rows of `length` words each; the words are those of the training file."""
    text = {
        name: (folder / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        for name in ("valid", "test")
    }
    counts = Counter(word for line in text["valid"] for word in line.split())
    numbers = {w: 3 + n for n, (w, _) in enumerate(counts.most_common(most_words))}
    found = {}
    for name, lines in text.items():
        ids = [
            number
            for line in lines
            for number in (*(numbers.get(w, UNKNOWN) for w in line.split()), END)
        ]
        whole = len(ids) // length * length
        found[name] = [ids[at : at + length] for at in range(0, whole, length)]
    return found


class Bilm(nn.Module):
    """(B, T) words -> (B, T, words) of the next one, and of the one before."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        words, width = config.vocab_size, config.embedding_size
        self.embed = nn.Embedding(words, width)
        given = {"batch_first": True, "dropout": config.dropout}
        given["proj_size"] = config.projection_size or 0
        sizes = (width, config.hidden_size, config.num_hidden_layers)
        self.onward, self.back = nn.LSTM(*sizes, **given), nn.LSTM(*sizes, **given)
        self.drop = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.output_size, words, bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        onward = self.onward(self.drop(self.embed(ids)))[0]
        back = self.back(self.drop(self.embed(ids.flip(1))))[0].flip(1)
        return self.head(self.drop(onward)), self.head(self.drop(back))

    def take(self, model: nn.Module) -> None:
        """The weights of flatout's."""
        own = {
            "embed.weight": "bilm.embeddings.weight",
            "head.weight": "lm_head.weight",
        }
        theirs = model.state_dict()
        for name in self.state_dict():
            stack, _, key = name.partition(".")
            if stack in ("onward", "back"):
                kind, layer = key.rsplit("_l", 1)
                side = "forward" if stack == "onward" else "backward"
                own[name] = f"bilm.{side}_layers.{layer}.{kind}_l0"
        self.load_state_dict({name: theirs[found] for name, found in own.items()})


def loss_of(model: Bilm, ids: Tensor) -> Tensor:
    """Mean over both directions."""
    onward, back = model(ids)
    losses = [
        nn.functional.cross_entropy(onward[:, :-1].flatten(0, 1), ids[:, 1:].flatten()),
        nn.functional.cross_entropy(back[:, 1:].flatten(0, 1), ids[:, :-1].flatten()),
    ]
    return torch.stack(losses).mean()


def plain(
    data: dict[str, Split], start: Path, given: argparse.Namespace
) -> dict[str, float]:
    """Tokens/s behind the first ten steps, and the perplexity of the test file."""
    from flatout.engine.batches.global_batches import GlobalBatches
    from flatout.engine.models.building import load_pretrained

    theirs = load_pretrained(start)
    model = Bilm(theirs.config)
    model.take(theirs)
    model.to(given.device)
    rows = torch.tensor(data["valid"])
    order = GlobalBatches(len(rows), given.batch, given.seed)
    total = order.total_steps(given.epochs)
    cast = torch.autocast(
        given.device, torch.bfloat16, enabled=given.precision == "bf16"
    )
    steps = [order.rows(step).tolist() for step in range(total)]
    loader = torch.utils.data.DataLoader(rows, batch_sampler=steps)
    fused = {"lr": given.learning_rate, "weight_decay": 0.0, "fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), **fused)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / total)
    begin, tokens = time.perf_counter(), 0
    for done, ids in enumerate(loader):
        if done == WARM_STEPS:
            begin, tokens = time.perf_counter(), 0
        with cast:
            loss = loss_of(model, ids.to(given.device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay.step()
        loss.item()
        tokens += ids.numel()
    rate = tokens / (time.perf_counter() - begin)
    model.eval()
    with torch.no_grad(), cast:
        losses = [
            (loss_of(model, ids.to(given.device)).item(), len(ids))
            for ids in torch.tensor(data["test"]).split(given.batch)
        ]
    mean = sum(x * n for x, n in losses) / sum(n for _, n in losses)
    return {"tokens_per_s": rate, "perplexity": math.exp(mean)}


WARM_STEPS = 10


def job_of(
    data: dict[str, Split], start: Path, given: argparse.Namespace, folder: Path
) -> Any:
    """flatout's training of the same."""
    from flatout.engine.parameters import parse_settings
    from flatout.engine.rows.tokens import TokenRows
    from flatout.engine.rows.vocabulary import Vocabulary
    from flatout.engine.train.setup.job import TrainJob

    rows = {
        name: TokenRows(pa.table({"input_ids": pa.array(own, pa.list_(pa.int32()))}))
        for name, own in data.items()
    }
    length = len(data["valid"][0])
    settings = parse_settings(
        {
            "runtime": {
                "seed": given.seed,
                "precision": given.precision,
                "threads": torch.get_num_threads(),
            },
            "model": {"task": "bidirectional-lm", "name_or_path": str(start)},
            "tokenize": {"max_length": length},
            "train": {
                "global_batch_size": given.batch,
                "learning_rate": given.learning_rate,
                "weight_decay": 0.0,
                "warmup_fraction": 0.0,
                "epochs": given.epochs,
                "evaluate_every": None,
                "error_analysis_every": None,
                "log_every": WARM_STEPS,
                "distributed": {"num_processes": 1},
            },
        }
    )
    words = Vocabulary(given.vocabulary + 3, pad_token_id=0)
    own = (rows["valid"], rows["test"], rows["test"])
    return TrainJob(settings, *own, words, (), folder / "run", folder / "m.jsonl")


def flatout(
    data: dict[str, Split], start: Path, given: argparse.Namespace
) -> dict[str, float]:
    """As `plain`."""
    from flatout.engine.machine.runtime import set_up
    from flatout.engine.train.loop import train

    with tempfile.TemporaryDirectory() as folder:
        job = job_of(data, start, given, Path(folder))
        report = train(job, set_up(job.settings.runtime)).report
    return {
        "tokens_per_s": report.tokens_per_s,
        "perplexity": report.metrics["test_perplexity"],
    }


def save_start(folder: Path, given: argparse.Namespace) -> None:
    """Weights that both begin at."""
    from transformers import AutoConfig, AutoModelForPreTraining

    import flatout.engine.families.bilm  # noqa: F401 - makes the type known

    torch.manual_seed(given.seed)
    sizes = {
        "embedding_size": given.width,
        "hidden_size": given.cells or given.width,
        "projection_size": given.projection,
        "num_hidden_layers": given.layers,
    }
    words = {"vocab_size": given.vocabulary + 3, "pad_token_id": 0}
    config = AutoConfig.for_model("bilm", **sizes, **words, dropout=given.dropout)
    AutoModelForPreTraining.from_config(config).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--cells", type=int, help="of an LSTM; else --width")
    parser.add_argument("--projection", type=int, help="of an LSTM's output")
    parser.add_argument("--vocabulary", type=int, default=4000, help="commonest words")
    parser.add_argument("--batch", type=int, default=32, help="blocks")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="the first")
    parser.add_argument("--seed", type=int, default=1, help="of weights and order")
    parser.add_argument("--device", default="cpu", help="the loop's")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--side", choices=["plain", "flatout"])
    parser.add_argument("--start", type=Path)
    given = parser.parse_args()
    if given.side:
        torch.set_num_threads(given.threads)
        torch.manual_seed(given.seed)
        side = {"plain": plain, "flatout": flatout}[given.side]
        data = blocks(given.folder, given.length, given.vocabulary)
        begin = time.process_time()
        found = side(data, given.start, given)
        found["cpu_s"] = time.process_time() - begin
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as start:
        save_start(Path(start), given)
        _by_turns(given.turns, [*sys.argv[1:], f"--start={start}"])


def _by_turns(turns: int, arguments: list[str]) -> None:
    module = [sys.executable, "-m", "tests.tools.bilm_plain", *arguments]
    ratios: dict[str, list[float]] = {"tokens_per_s": [], "cpu_s": []}
    for _ in range(turns):
        found = {}
        for side in ("plain", "flatout"):
            command = [*module, f"--side={side}"]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            found[side] = json.loads(done.stdout.splitlines()[-1])
            print(side, found[side], flush=True)
        for name, own in ratios.items():
            own.append(found["flatout"][name] / found["plain"][name])
    for name, own in ratios.items():
        print(f"{name}, flatout by plain:", own, "median", statistics.median(own))


if __name__ == "__main__":
    main()
