"""Token budgets, memory and rates of models on cards of several sizes, on one GPU.

    python -m tests.tools.card_memory
    python -m tests.tools.card_memory --only BERT-base --cards 8 24
    python -m tests.tools.card_memory --rehearse                 # tiny, on CPU cores

A process may take as much of the GPU as a card of that size has. It chooses a budget,
trains a few steps and evaluates: a line a combination, each in a process of its own
that is ended after `--timeout-s`. `expected` is what the choice of the budget expects
of the largest micro-batch that came, `needed` what was allocated, `held` what the
allocator reserved. The most important come first; after `--deadline-s` none is begun.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from flatout.engine.batches.collation import MicroBatch
from flatout.engine.families import families
from flatout.engine.machine.runtime import memory, set_up
from flatout.engine.models import building
from flatout.engine.parameters import parse_settings
from flatout.engine.rows.arrays import ArrayRows
from flatout.engine.rows.tokens import TokenRows
from flatout.engine.rows.vocabulary import Vocabulary
from flatout.engine.train.keeping.oom import OutOfMemory, is_out_of_memory
from flatout.engine.train.loop import evaluate_split
from flatout.engine.train.setup import assemble as assembling
from flatout.engine.train.setup import calibration
from flatout.engine.train.setup.job import TrainJob

logger = logging.getLogger(__name__)

GIB = 2**30
CARDS = {8: 7.2, 16: 14.1, 24: 21.4, 40: 38.8, 80: 78.4, 141: 139.0}
"""GB on the label -> GiB that a process can take: what the driver shows of a RTX 3070,
T4, L4, A100, H100 and H200, without half a GiB of context."""
STEPS, WARM_STEPS = 5, 2
MOST_S = 8.0
"""Of steps, but for the last of them."""


@dataclass(frozen=True)
class Shape:
    """A model, and rows for it."""

    config: dict[str, Any]
    task: str = "sequence-classification"
    max_length: int = 512
    batch: int = 256
    vocabulary: int = 30_522
    kind: str = "tokens"
    sample: tuple[int, ...] = ()
    train: dict[str, Any] = field(default_factory=dict)


def encoder(hidden: int, layers: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "bert",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "intermediate_size": 4 * hidden,
        **more,
    }


def decoder(kind: str, hidden: int, layers: int, **more: Any) -> dict[str, Any]:
    common = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers}
    tied = {"tie_word_embeddings": True, "model_type": kind}
    return {**common, **sizes, **tied, **more}


QWEN3 = decoder("qwen3", 1024, 28, intermediate_size=3072)
QWEN_LARGE = decoder("qwen2", 1536, 28, intermediate_size=8960) | {
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}
QWEN_LARGE.pop("head_dim")
MODERN = {
    "model_type": "modernbert",
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
}
VIT_S = {
    "model_type": "vit",
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
    "patch_size": 16,
}
LM = {"task": "causal-lm", "max_length": 1024, "batch": 128, "vocabulary": 151_936}
SHAPES = {
    "BERT-base": Shape(encoder(768, 12)),
    "BERT-large": Shape(encoder(1024, 24)),
    "Qwen3-0.6B": Shape(QWEN3, **LM),
    "ModernBERT-base 2,048": Shape(MODERN, max_length=2048, batch=64),
    "DistilBERT": Shape({"model_type": "distilbert"}),
    "ViT-S": Shape(
        VIT_S, "image-classification", 1, 1024, 0, "images", (224, 224, 3)
    ),
    "Qwen-1.5B": Shape(QWEN_LARGE, **LM),
    "LSTM": Shape(
        {"model_type": "log_key_lstm", "hidden_size": 512, "num_hidden_layers": 2},
        "causal-lm", 128, 1024, 500,
    ),
    "BERT-base, masked": Shape(encoder(768, 12), "masked-lm"),
    "BERT-base, frozen": Shape(
        encoder(768, 12), train={"freeze": ["embeddings", "encoder.layer.[0-5]"]}
    ),
    "BERT-base, recomputed": Shape(
        encoder(768, 12), train={"gradient_checkpointing": True}
    ),
    "BERT-base, padded": Shape(encoder(768, 12), train={"batching": "grouped"}),
    "BiLM": Shape(
        {"model_type": "bilm", "hidden_size": 1024, "num_hidden_layers": 2},
        "bidirectional-lm", 256, 256,
    ),
    "MLP": Shape(
        {"model_type": "residual_mlp", "preset": "large"},
        "sequence-classification", 1, 8192, 0, "arrays", (256,),
    ),
    "ConvNeXt-T": Shape(
        {"model_type": "convnext"},
        "image-classification", 1, 1024, 0, "images", (224, 224, 3),
    ),
    "BERT-base at 32": Shape(encoder(768, 12), batch=32, max_length=128),
}  # fmt: skip
SMALL = {
    "hidden_size": 64,
    "dim": 64,
    "hidden_dim": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "n_layers": 2,
    "num_attention_heads": 2,
    "n_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "embedding_size": 16,
    "hidden_sizes": [8, 8, 8, 8],
    "depths": [1, 1, 1, 1],
}


def in_small(shape: Shape) -> Shape:
    """The same on a CPU."""
    kind = shape.config["model_type"]
    known = set(shape.config)
    if kind == "distilbert":
        known |= {"dim", "hidden_dim", "n_layers", "n_heads"}
    if kind == "convnext":
        known |= {"hidden_sizes", "depths"}
    config = shape.config | {k: v for k, v in SMALL.items() if k in known}
    sample = shape.sample and (32, 32, 3) if shape.kind == "images" else shape.sample
    length, pieces = min(32, shape.max_length), min(200, shape.vocabulary)
    small = {"config": config, "batch": 8, "max_length": length, "sample": sample}
    return replace(shape, **small, vocabulary=pieces)


@dataclass(frozen=True)
class Combination:
    """A line of the table."""

    model: str
    card: int
    """GB."""
    compile: bool = False
    cuda_graphs: bool = False

    @property
    def name(self) -> str:
        more = " compiled" if self.compile else ""
        return f"{self.model}{more}{' graphs' if self.cuda_graphs else ''}"


FIRST = ("BERT-base", "Qwen3-0.6B", "BERT-large", "ModernBERT-base 2,048")
OTHERS = ("DistilBERT", "ViT-S", "Qwen-1.5B", "LSTM")
WAYS = tuple(SHAPES)[8:15]
"""Further families, and other ways to train."""


def combinations() -> Iterator[Combination]:
    """The most important first."""
    for card in (24, 8, 80, 16, 40):
        for model in FIRST:
            yield Combination(model, card)
    yield Combination("BERT-base", 16, compile=True)
    yield Combination("BERT-base at 32", 8, cuda_graphs=True)
    yield Combination("Qwen3-0.6B", 40, compile=True)
    for model in (*WAYS, *OTHERS):
        yield Combination(model, 8)
    for card in (24, 80):
        for model in OTHERS:
            yield Combination(model, card)
    for model in FIRST:
        yield Combination(model, 141)
    for card in (40, 16, 141):
        for model in OTHERS:
            yield Combination(model, card)


def job_of(
    shape: Shape, folder: Path, runtime: dict[str, Any], train: dict[str, Any]
) -> TrainJob:
    given = {
        "runtime": runtime,
        "model": {"task": shape.task, "config": shape.config},
        "tokenize": {"max_length": max(2, shape.max_length)},
        "images": {"size": shape.sample[0] if shape.sample else 8},
        "train": {
            "rows": shape.kind,
            "global_batch_size": shape.batch,
            "on_oom": "stop",
            "distributed": {"num_processes": 1},
            **shape.train,
            **train,
        },
    }
    rows = token_rows(shape) if shape.kind == "tokens" else samples(shape)
    vocabulary = None
    if shape.vocabulary:
        special = {"mask_token_id": 4, "special_token_ids": (0, 1, 2, 3, 4)}
        vocabulary = Vocabulary(shape.vocabulary, 0, **special)
    names = () if shape.task.endswith("lm") else ("a", "b", "c")
    paths = (folder / "run", folder / "metrics.jsonl")
    settings = parse_settings(given)
    return TrainJob(settings, rows, rows, rows, vocabulary, names, *paths, "k")


def token_rows(shape: Shape) -> TokenRows:
    """Of lengths up to `max_length`, most of them short, for two steps."""
    chance = np.random.default_rng(0)
    lengths = chance.beta(2, 3, 2 * shape.batch) * shape.max_length
    lengths = np.clip(lengths, 4, shape.max_length).astype(int)
    lengths[:: max(1, shape.batch // 8)] = shape.max_length
    ids = [chance.integers(5, shape.vocabulary, n).astype(np.int32) for n in lengths]
    columns = {"input_ids": pa.array(ids, pa.list_(pa.int32()))}
    if not shape.task.endswith("lm"):
        columns["labels"] = pa.array([n % 3 for n in range(len(ids))], pa.int64())
    return TokenRows(pa.table(columns))


def samples(shape: Shape) -> ArrayRows:
    count, size = shape.batch, int(np.prod(shape.sample))
    chance = np.random.default_rng(0)
    values = chance.integers(0, 255, count * size, np.uint8)
    column = pa.array(values if shape.kind == "images" else values.astype(np.float32))
    for length in reversed(shape.sample):
        column = pa.FixedSizeListArray.from_arrays(column, length)
    labels = pa.array([n % 3 for n in range(count)], pa.int64())
    return ArrayRows(pa.table({"inputs": column, "labels": labels}))


def filled_on_the_device(device: torch.device) -> None:
    """Weights are drawn there: on the host a billion of them takes ten seconds."""
    from transformers.initialization import no_init_weights

    build = building.build

    def quick(*args: Any, **options: Any) -> Any:
        with no_init_weights():
            model = build(*args, **options)
        model.to(device)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() > 1:
                    weight.normal_(0.0, 0.02)
                else:
                    weight.fill_(float("norm" in name.lower() and "bias" not in name))
        return model

    assembling.build = quick


def measure(found: Combination, shapes: dict[str, Shape], folder: Path) -> dict:
    """Figures of one combination, in a process of its own."""
    shape, cuda = shapes[found.model], torch.cuda.is_available()
    runtime_settings = {"memory_limit_gib": CARDS[found.card]} if cuda else {}
    train = {"compile": found.compile, "cuda_graphs": found.cuda_graphs and cuda}
    job = job_of(shape, folder, runtime_settings, train)
    runtime = set_up(job.settings.runtime)
    if cuda:
        filled_on_the_device(runtime.device)
        calibration.is_plenty = lambda *_, **__: (
            False
        )  # each line shows what it expects
    begin = time.perf_counter()
    trainer = assembling.assemble(job, runtime)
    figures: dict[str, Any] = {
        "setup_s": time.perf_counter() - begin,
        "budget": trainer.resolved.token_budget,
        "graphs": trainer.resolved.cuda_graphs,
        "strategy": trainer.resolved.strategy,
        "reason": trainer.resolved.budget_reason,
        "demand": trainer.demand and asdict(trainer.demand),
    }
    trainer.model.train()
    largest, parts, begin = 0, 1, time.perf_counter()
    seconds: list[float] = []
    try:
        while len(seconds) < STEPS and sum(seconds) < MOST_S:
            batch = trainer.data[len(seconds) % 2].to(runtime.device)
            sizes = [sized(micro) for micro in batch.micro_batches]
            largest, parts = max(largest, *sizes), max(parts, len(sizes))
            begin = time.perf_counter()
            trainer.stepper(batch)
            runtime.synchronize()
            seconds.append(time.perf_counter() - begin)
        steady_s = median(seconds[WARM_STEPS:] or seconds[-1:])
        figures["samples_per_s"] = shape.batch / steady_s
        figures |= memory(runtime) | {"largest": largest, "parts": parts}
        if trainer.demand:
            figures["expected_gib"] = (
                trainer.demand.peak(
                    largest, several=parts > 1, graphs=trainer.resolved.cuda_graphs
                )
                / GIB
            )
        begin = time.perf_counter()
        evaluate_split(trainer, job.validation)
        figures |= {"evaluate_s": time.perf_counter() - begin, "status": "ok"}
        figures["evaluated_gib"] = memory(runtime)["peak_allocated_gib"]
    except (RuntimeError, OutOfMemory) as error:
        if not (isinstance(error, OutOfMemory) or is_out_of_memory(error)):
            raise
        where = "steps" if "samples_per_s" not in figures else "evaluation"
        figures |= {"status": f"oom in {where}", **memory(runtime)}
    return figures


def sized(micro: MicroBatch) -> int:
    """Tokens, or samples, of a micro-batch."""
    if "input_ids" in micro.inputs:
        return micro.inputs["input_ids"].numel()
    return len(micro.inputs["inputs"])


def alone(found: Combination, names: str, file: str) -> None:
    """What a process of its own runs."""
    logging.disable(logging.WARNING)
    shapes = SHAPES
    if names == "tiny":
        shapes = {name: in_small(shape) for name, shape in SHAPES.items()}
    with tempfile.TemporaryDirectory(prefix="card-memory-") as folder:
        try:
            figures = measure(found, shapes, Path(folder))
        except Exception as error:  # a line of its own
            figures = {"status": f"{type(error).__name__}: {str(error)[:400]}"}
    Path(file).write_text(json.dumps(figures), encoding="utf-8")


def run(found: Combination, names: str, start: str, timeout_s: float) -> dict:
    with tempfile.TemporaryDirectory(prefix="card-memory-") as folder:
        file = str(Path(folder) / "figures.json")
        context = multiprocessing.get_context(start)
        process = context.Process(target=alone, args=(found, names, file))
        begin = time.perf_counter()
        process.start()
        process.join(timeout_s)
        if process.is_alive():
            process.kill()
            process.join()
            figures = {"status": f"not done in {timeout_s:g} s"}
        elif Path(file).exists():
            figures = json.loads(Path(file).read_text(encoding="utf-8"))
        else:
            figures = {"status": f"ended with status {process.exitcode}"}
    return {"seconds": time.perf_counter() - begin, **figures}


HEAD = (
    "| model | card GB | token budget | samples/s | expected GiB | needed | held "
    "| off % | evaluated | retries | set up s | all s | |"
)


def line(found: Combination, figures: dict[str, Any]) -> str:
    def cell(name: str, form: str = ".1f") -> str:
        value = figures.get(name)
        return "" if value is None else format(value, form)

    expected = figures.get("expected_gib")
    name = "peak_reserved_gib" if figures.get("graphs") else "peak_allocated_gib"
    off = ""
    if expected and figures.get(name):
        off = f"{100 * (expected / figures[name] - 1):+.0f}"
    graphs = " (graphs)" if figures.get("graphs") else ""
    cells = (
        *(found.name + graphs, str(found.card), cell("budget", ",")),
        *(cell("samples_per_s", ",.0f"), cell("expected_gib", ".2f")),
        *(cell("peak_allocated_gib", ".2f"), cell("peak_reserved_gib", ".2f"), off),
        *(cell("evaluated_gib", ".2f"), cell("allocation_retries", "d")),
        *(cell("setup_s"), cell("seconds"), str(figures["status"])),
    )
    return f"| {' | '.join(cells)} |"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="names of lines")
    parser.add_argument("--but", nargs="*", default=[], help="NAME@CARD, left out")
    parser.add_argument("--cards", nargs="*", type=int)
    parser.add_argument("--deadline-s", type=float, default=280)
    parser.add_argument("--timeout-s", type=float, default=60)
    parser.add_argument("--start", choices=["fork", "spawn"], default="fork")
    parser.add_argument("--figures", type=Path, help="a JSON file of all figures")
    parser.add_argument("--rehearse", action="store_true")
    return parser.parse_args()


def main() -> int:
    given, begin = parsed(), time.monotonic()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    # What is imported here, each process has; the driver must not be started before.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    families()
    chosen = list(combinations())
    if given.rehearse:
        chosen = [Combination(model, 8) for model in SHAPES]
    logger.info(HEAD)
    logger.info("|" + "---|" * (HEAD.count("|") - 1))
    start, everything = given.start, []
    for found in chosen:
        left = given.deadline_s - (time.monotonic() - begin)
        if given.only and found.name not in given.only:
            continue
        if f"{found.name}@{found.card}" in given.but:
            continue
        if given.cards and found.card not in given.cards:
            continue
        if left < 10:
            logger.info(f"| {found.name} | {found.card} | not begun |")
            continue
        names = "tiny" if given.rehearse else "all"
        limit_s = min(given.timeout_s, left)
        figures = run(found, names, start, limit_s)
        if start == "fork" and "CUDA" in str(figures["status"])[:200]:
            start = "spawn"  # a driver that was started before it was forked
            figures = run(found, names, start, limit_s)
        logger.info(line(found, figures))
        everything.append({**asdict(found), **figures})
        if given.figures:
            given.figures.write_text(json.dumps(everything, indent=1))
    bad = [e for e in everything if e["status"] != "ok"]
    logger.info(f"{len(everything)} lines, {len(bad)} not ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
