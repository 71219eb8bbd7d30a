"""Seconds from the command to the saved model, beside a Trainer script.

    python -m tests.tools.command_to_model --turns 2
    python -m tests.tools.command_to_model --rows 400 --epochs 1      # a rehearsal

The job: about 10,000 short texts to train on, batch 32, a checkpoint of 6 layers of 384
whose weights are drawn here (times do not ask for their values). A turn is `kedro run`
with no caches, the Trainer's script twice (plain, and with flags that are to speed it
up), and `kedro run` again with another seed, whose tokens and compiled code are there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from tests.tools.gpu_check import PROJECT, FailedError, device_name

SCRIPT = "tests/tools/trainer_script.py"
WORDS = 20
LENGTH = 128


def make_job(folder: Path, rows: int, layers: int = 6, width: int = 384) -> None:
    """`job.csv`, of first words of docstrings, and a checkpoint with its tokenizer."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    from flatout.datasets import DocstringCorpus

    corpus = DocstringCorpus(filepath=str(folder / "raw"), rows=None, labels=10).load()
    frame = corpus.to_pandas().sample(frac=1, random_state=0)
    frame["text"] = frame["text"].map(lambda text: " ".join(text.split()[:WORDS]))
    frame = frame.drop_duplicates("text")[["text", "label"]].head(rows)
    frame.to_csv(folder / "job.csv", index=False)
    trained = BertWordPieceTokenizer()
    trained.train_from_iterator(frame["text"], vocab_size=30_522)
    trained.save(str(folder / "tokenizer.json"))
    tokenizer = BertTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), model_max_length=LENGTH
    )
    config = BertConfig(
        vocab_size=30_522,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 32),
        intermediate_size=4 * width,
    )
    BertModel(config).save_pretrained(folder / "checkpoint")
    tokenizer.save_pretrained(folder / "checkpoint")


def make_conf(folder: Path, epochs: float) -> None:
    """The project's conf, with an environment `job`."""
    shutil.copytree(PROJECT / "conf", folder / "conf")
    job = folder / "conf" / "job"
    job.mkdir()
    texts = {
        "type": "flatout.datasets.TextFiles",
        "filepath": str(folder / "job.csv"),
    }
    (job / "catalog.yml").write_text(yaml.safe_dump({"raw_texts": texts}))
    parameters = {
        "model": {"name_or_path": str(folder / "checkpoint")},
        "tokenize": {"max_length": LENGTH},
        "train": {
            "global_batch_size": 32,
            "learning_rate": 5e-5,
            "epochs": epochs,
            "error_analysis_every": None,
        },
    }
    (job / "parameters.yml").write_text(yaml.safe_dump(parameters))


def seconds(command: Sequence[str], folder: Path) -> float:
    """Of a whole command. Raises FailedError."""
    return done(command, folder)[0]


def done(command: Sequence[str], folder: Path) -> tuple[float, str]:
    """Seconds of a whole command, and what it said. Raises FailedError."""
    begin = time.perf_counter()
    process = start(command, folder)
    text, _ = process.communicate()
    if process.returncode:
        raise FailedError(f"{' '.join(command)}\n{text[-3000:]}")
    return time.perf_counter() - begin, text


def start(command: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """`python COMMAND`, which leads a process group of its own."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
    path = os.pathsep.join([str(PROJECT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": path, **cache},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def kedro(folder: Path, seed: int, *more: str, pipelines: str = "") -> list[str]:
    """`more`: parameters, as in `train.max_steps=1`."""
    given = [f"data_dir={folder / 'data'}", f"runtime.seed={seed}", *more]
    return [
        *("-m", "kedro", "run", "--env=job", f"--conf-source={folder / 'conf'}"),
        *([f"--pipelines={pipelines}"] if pipelines else []),
        f"--params={','.join(given)}",
    ]


def turn(folder: Path, number: int, epochs: float) -> dict[str, float]:
    """Seconds by what was run."""
    for name in ("data", "compiled"):
        shutil.rmtree(folder / name, ignore_errors=True)
    script = [SCRIPT, str(folder), "--epochs", str(epochs)]
    found = {"kedro run, no caches": seconds(kedro(folder, 2 * number), folder)}
    found["Trainer, plain"] = seconds(script, folder)
    found["Trainer, with flags"] = seconds([*script, "--flags"], folder)
    again = kedro(folder, 2 * number + 1)
    found["kedro run again, another seed"] = seconds(again, folder)
    return found


def phases(folder: Path) -> Mapping[str, float]:
    """Of the last training."""
    report = folder / "data" / "08_reporting" / "train_report.json"
    found: dict[str, Any] = json.loads(report.read_text())
    return dict(found["phases_s"])


def show(turns: Sequence[Mapping[str, float]]) -> None:
    best = min(median(t[name] for t in turns) for name in turns[0] if "Train" in name)
    lines = ["| command | s, each turn | median | over the Trainer's best |"]
    lines += ["|---|---|---|---|"]
    for name in turns[0]:
        found = [one[name] for one in turns]
        shown = ", ".join(f"{one:.1f}" for one in found)
        middle = median(found)
        lines.append(f"| {name} | {shown} | {middle:.1f} | {middle / best:.2f} |")
    print("\n".join(lines), flush=True)  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=13_500)
    parser.add_argument("--epochs", type=float, default=5)
    parser.add_argument("--turns", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flatout-") as name:
        folder = Path(name)
        make_job(folder, given.rows)
        make_conf(folder, given.epochs)
        turns = []
        for number in range(given.turns):
            turns.append(turn(folder, number, given.epochs))
            show(turns)
        told = ", ".join(f"{k} {v:.1f}" for k, v in phases(folder).items())
        print(f"the last kedro run: {told}\non {device_name()}")  # noqa: T201


if __name__ == "__main__":
    main()
