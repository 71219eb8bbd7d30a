"""Rates of the newer tasks beside those they are held to, on the built-in corpus.

    python -m tests.tools.task_rates
    python -m tests.tools.task_rates --size small --rounds 3      # on CPU cores

Several labels beside one label, and completions beside the same texts whole: whole
trainings that alternate (A B B A). Tags of words beside the Trainer at its best flags:
the benchmark's mode headline. Labels, tags and halves are made from the corpus by rule:
rates do not ask for their meaning.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from flatout.datasets import DocstringCorpus
from tests.tools.gpu_check import PROJECT, FailedError, device_name, run, undisturbed

Row = dict[str, Any]
ENCODERS = {
    "small": {"model_type": "bert", "hidden_size": 128, "num_hidden_layers": 2}
    | {"num_attention_heads": 2, "intermediate_size": 512},
    "base": {"model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12}
    | {"num_attention_heads": 12, "intermediate_size": 3072},
}
DECODERS = {
    "small": {"model_type": "qwen3", "hidden_size": 128, "num_hidden_layers": 2}
    | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    | {"intermediate_size": 384, "tie_word_embeddings": True},
    "base": {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    | {"intermediate_size": 3072, "tie_word_embeddings": True},
}
BATCHES = {"small": 16, "base": 256}
STEPS = {"small": (80, 10), "base": (200, 20)}
"""Of a training, and between two log points."""


@dataclass(frozen=True)
class Kind:
    """Rows of a task and the settings that read them."""

    task: str
    columns: dict[str, str | None]
    make: Callable[[Row], Row]
    causal: bool = False


def tagged(row: Row) -> Row:
    """Words, with tags by their shape."""
    words = re.findall(r"\w+|[^\w\s]", row["text"]) or ["-"]
    tags = ["B-X" if w[0].isupper() else "B-N" if w.isdigit() else "O" for w in words]
    return {"words": words, "tags": tags}


def halves(row: Row) -> Row:
    cut = row["text"].find(" ", len(row["text"]) // 2)
    cut = cut if cut > 0 else len(row["text"]) // 2
    return {"prompt": row["text"][:cut], "completion": row["text"][cut:] or "."}


KINDS = {
    "one label": Kind(
        "sequence-classification",
        {"text_column": "text", "label_column": "label"},
        lambda row: row,
    ),
    "several labels": Kind(
        "multi-label-classification",
        {"text_column": "text", "label_column": "label"},
        lambda row: {"text": row["text"], "label": [row["label"]]},
    ),
    "tags": Kind(
        "token-classification", {"text_column": "words", "label_column": "tags"}, tagged
    ),
    "whole texts": Kind(
        "causal-lm",
        {"text_column": "text", "label_column": None},
        lambda row: {"text": row["text"]},
        causal=True,
    ),
    "completions": Kind(
        "causal-lm",
        {"prompt_column": "prompt", "completion_column": "completion"}
        | {"label_column": None},
        halves,
        causal=True,
    ),
}
PAIRS = (("several labels", "one label"), ("completions", "whole texts"))


@dataclass(frozen=True)
class Place:
    """A scratch folder with a conf of its own."""

    folder: Path
    size: str

    @property
    def conf(self) -> Path:
        return self.folder / "conf"

    def kedro(self, kind: str, pipelines: str, gpu: int | None = None, **given: Any):
        env, data = kind.replace(" ", "_"), self.folder / kind.replace(" ", "_")
        named = {"data_dir": data, **given}
        text = ",".join(f"{name}={value}" for name, value in named.items())
        command = ["-m", "kedro", "run", f"--conf-source={self.conf}", f"--env={env}"]
        run([*command, f"--pipelines={pipelines}", f"--params={text}"], PROJECT, gpu)
        return data / "08_reporting"

    def prepare(self, kinds: Sequence[str], rows: int | None) -> None:
        shutil.copytree(PROJECT / "conf", self.conf)
        corpus = DocstringCorpus(filepath=str(self.folder), rows=rows, labels=12)
        texts = corpus.load().to_list()
        for kind in kinds:
            self._write(kind, texts)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda kind: self.kedro(kind, "split,tokenize"), kinds))

    def _write(self, kind: str, texts: list[Row]) -> None:
        made, file = KINDS[kind], self.folder / f"{kind.replace(' ', '_')}.jsonl"
        with file.open("w", encoding="utf-8") as out:
            out.writelines(json.dumps(made.make(row)) + "\n" for row in texts)
        entry = {"type": "flatout.datasets.TextFiles", "filepath": str(file)}
        base = self.size == "base"
        parameters = {
            "split": made.columns,
            "model": {
                "task": made.task,
                "config": (DECODERS if made.causal else ENCODERS)[self.size],
            },
            "tokenize": {"vocab_size": 30_522 if base else 4_000},
            "train": {
                "global_batch_size": BATCHES[self.size],
                "learning_rate": 1e-4,
                **({"token_budget": 32_768} if made.causal and base else {}),
                "error_analysis_every": None,
            },
        }
        env = self.conf / kind.replace(" ", "_")
        env.mkdir()
        for name, what in (
            ("catalog", {"raw_texts": entry}),
            ("parameters", parameters),
        ):
            (env / f"{name}.yml").write_text(yaml.safe_dump(what), encoding="utf-8")

    def rate(self, kind: str, gpu: int | None) -> float:
        """Samples/s of a whole training."""
        steps, log_every = STEPS[self.size]
        if KINDS[kind].causal:
            steps, log_every = steps // 4, log_every // 4
        options = {
            "train.max_steps": steps,
            "train.log_every": log_every,
            **undisturbed(),
        }
        report = self.kedro(kind, "train", gpu, **options) / "train_report.json"
        return float(json.loads(report.read_text(encoding="utf-8"))["samples_per_s"])

    def turns(self, pair: tuple[str, str], rounds: int, gpu: int | None) -> str:
        found: dict[str, list[float]] = {kind: [] for kind in pair}
        for kind in rounds * (*pair, *reversed(pair)):
            found[kind].append(self.rate(kind, gpu))
        first, second = (found[kind] for kind in pair)
        ratios = [a / b for a, b in zip(first, second, strict=True)]
        shown = (", ".join(f"{rate:,.0f}" for rate in side) for side in (first, second))
        return "| {} beside {} | {} | {} | {:.3f} |".format(
            *pair, *shown, median(ratios)
        )

    def headline(self, gpu: int | None) -> str:
        options = {
            "benchmark.mode": "headline",
            "benchmark.contenders": "flatout trainer-best",
        }
        report = self.kedro("tags", "benchmark", gpu, **options)
        text = (report / "benchmark_report.md").read_text(encoding="utf-8")
        return "\n".join(line for line in text.splitlines() if line.startswith("|"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", choices=list(BATCHES), default="base")
    parser.add_argument("--rows", type=int, help="of the corpus; all where not given")
    parser.add_argument("--rounds", type=int, default=1, help="of A B B A")
    named = ["labels", "completions", "tags"]
    parser.add_argument("--only", nargs="+", choices=named, default=named)
    parser.add_argument("--gpu", type=int, help="its number; else all")
    asked = parser.parse_args()
    pairs = [p for name, p in zip(named, PAIRS, strict=False) if name in asked.only]
    kinds = [kind for pair in pairs for kind in pair]
    kinds += ["tags"] if "tags" in asked.only else []
    with tempfile.TemporaryDirectory(prefix="flatout-task-rates-") as folder:
        place = Place(Path(folder), asked.size)
        try:
            place.prepare(kinds, asked.rows)
            for pair in pairs:
                print(place.turns(pair, asked.rounds, asked.gpu), flush=True)  # noqa: T201
            if "tags" in asked.only:
                print(place.headline(asked.gpu), flush=True)  # noqa: T201
        except FailedError as error:
            sys.stderr.write(f"{error}\n")
            return 1
    print(f"on {device_name()}")  # noqa: T201
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
