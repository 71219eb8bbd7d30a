"""Compare how long flatout and a Trainer script take from the command to the model.

    python -m benchmarks.commands
    python -m benchmarks.commands --small --turns 1

The job trains on about 13,000 short texts for 5 epochs at batch size 32. The checkpoint
has 6 layers of width 384 and random weights. In the cold case, only the texts and the
checkpoint exist. In the warm case, an earlier command with another seed has already
created the tokens and the compiled code.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Figures, Script, main
from benchmarks.projects import Project, timed

WORDS, CLASSES, LENGTH = 4_000, 10, 128


def write_texts(file: Path, rows: int) -> None:
    """Write a CSV file with texts of about 20 words and their classes. Some words of a
    text are typical of its class."""
    chance = np.random.default_rng(0)
    words = [f"word{number}" for number in range(WORDS)]
    with file.open("w", newline="", encoding="utf-8") as target:
        out = csv.writer(target)
        out.writerow(["text", "label"])
        for number in range(rows):
            label = number % CLASSES
            own = WORDS // 2 + label * 50 + chance.integers(0, 50, 4)
            others = chance.integers(0, WORDS, int(chance.integers(8, 24)))
            text = " ".join(words[i] for i in chance.permutation([*own, *others]))
            out.writerow([text, f"class_{label}"])


def write_checkpoint(folder: Path, texts: Path, *, small: bool) -> None:
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    trained = BertWordPieceTokenizer()
    trained.train([str(texts)], vocab_size=30_522)
    folder.mkdir()
    trained.save(str(folder / "tokenizer.json"))
    tokenizer = BertTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), model_max_length=LENGTH
    )
    layers, width = (2, 32) if small else (6, 384)
    config = BertConfig(
        vocab_size=30_522,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 32),
        intermediate_size=4 * width,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prepared(folder: Path, *, small: bool) -> None:
    texts = folder / "texts.csv"
    write_texts(texts, 400 if small else 16_350)
    write_checkpoint(folder / "checkpoint", texts, small=small)


def _flatout(folder: Path, given: argparse.Namespace) -> Any:
    """Return a function that runs the flatout command with a given seed and returns the
    duration and the test accuracy."""
    parameters = {
        "model": {"name_or_path": str(folder / "checkpoint")},
        "tokenize": {"max_length": LENGTH},
        "train": {
            "global_batch_size": 32,
            "learning_rate": 5e-5,
            "epochs": 1 if given.small else 5,
        },
    }
    texts = {"type": "flatout.datasets.TextFiles", "filepath": f"{folder}/texts.csv"}
    project = Project.make(folder, None, parameters, {"raw_texts": texts})

    def command(seed: int) -> Figures:
        seconds = project.run(**{"runtime.seed": seed})
        found = project.report
        return {"seconds": seconds, "test_accuracy": found.get("test_accuracy")}

    return command


def _script(flags: dict[str, Any], folder: Path, given: argparse.Namespace) -> Any:
    def command(seed: int) -> Figures:
        job = {
            "seed": seed,
            "rows": str(folder / "texts.csv"),
            "checkpoint": str(folder / "checkpoint"),
            "max_length": LENGTH,
            "work": str(folder / "work"),
            "model": str(folder / "model"),
            "result": str(folder / "result.json"),
            "arguments": {
                "per_device_train_batch_size": 32,
                "per_device_eval_batch_size": 256,
                "learning_rate": 5e-5,
                "num_train_epochs": 1 if given.small else 5,
                **flags,
            },
        }
        (folder / "job.json").write_text(json.dumps(job))
        module = ["-m", "benchmarks.trainer_script", str(folder / "job.json")]
        seconds = timed([sys.executable, *module], folder)
        return {"seconds": seconds, **json.loads((folder / "result.json").read_text())}

    return command


def side(make: Any, given: argparse.Namespace) -> Figures:
    """Return the metrics of one command. In the cold case, its caches are empty. In the
    warm case, it is the second of two commands. `make` returns the function that runs
    the command with a seed."""
    with tempfile.TemporaryDirectory(prefix="flatout-") as name:
        folder = Path(name)
        prepared(folder, small=given.small)
        command = make(folder, given)
        found: Figures = command(1)
        if given.case == "warm":
            found = {**command(2), "cold_seconds": found["seconds"]}
        return found


BEST = {"bf16": True, "optim": "adamw_torch_fused"}
BEST |= {"train_sampling_strategy": "batch_rebalance", "dataloader_num_workers": 2}
SIDES = {
    "flatout": partial(side, _flatout),
    "Trainer script, default flags": partial(side, partial(_script, {})),
    "Trainer script, best flags": partial(side, partial(_script, BEST)),
}
SCRIPT = Script(
    "benchmarks.commands",
    "whole commands compared with a Trainer script",
    {"cold": SIDES, "warm": SIDES},
    figure="seconds",
    small_cases=("cold",),
)

if __name__ == "__main__":
    raise SystemExit(main(SCRIPT))
