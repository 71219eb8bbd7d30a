"""The job whose seconds from the command to the saved model are measured.

    python -m tests.tools.command_to_model --turns 2
    python -m tests.tools.command_to_model --rows 400 --epochs 1      # a rehearsal

About 10,000 short texts to train on, batch 32, a checkpoint of 6 layers of 384 whose
weights are drawn here (times do not ask for their values). Mode journey of the
benchmark measures it; `--keep FOLDER` keeps its tables, pictures and logs.
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from tests.tools.gpu_check import PROJECT, FailedError

WORDS = 20
LENGTH = 128


def make_job(folder: Path, rows: int, layers: int = 6, width: int = 384) -> None:
    """`job.csv`, of first words of docstrings, and a checkpoint with its tokenizer."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    from flatout.datasets import DocstringCorpus
    from flatout.datasets.docstring_corpus import PACKAGES

    labels = min(10, sum(find_spec(name) is not None for name in PACKAGES))
    place = str(folder / "raw")
    corpus = DocstringCorpus(filepath=place, rows=None, labels=labels).load()
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


def seconds(command: Sequence[str], folder: Path, *, shown: bool = False) -> float:
    """Of a whole command; what it says is shown as it comes, or where it fails. Raises
    FailedError."""
    begin = time.perf_counter()
    process = start(command, folder, None if shown else subprocess.PIPE)
    text, _ = process.communicate()
    if process.returncode:
        raise FailedError(f"{' '.join(command)}\n{(text or '')[-3000:]}")
    return time.perf_counter() - begin


def start(
    command: Sequence[str], folder: Path, output: int | None = subprocess.PIPE
) -> subprocess.Popen[str]:
    """`python COMMAND`, which leads a process group of its own."""
    cache = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
        "HF_DATASETS_CACHE": str(folder / "datasets"),
    }
    path = os.pathsep.join([str(PROJECT / "src"), os.environ.get("PYTHONPATH", "")])
    own = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=PROJECT,
        env={**own, "PYTHONPATH": path, **cache},
        stdout=output,
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


def phases(folder: Path) -> Mapping[str, float]:
    """Of the last training."""
    report = folder / "data" / "08_reporting" / "train_report.json"
    found: dict[str, Any] = json.loads(report.read_text())
    return dict(found["phases_s"])


def journey(turns: int, contenders: str) -> list[str]:
    """What `kedro run` is told, to leave a journey in its data folder."""
    return [
        "benchmark.mode=journey",
        f"benchmark.repeats={turns}",
        f"benchmark.contenders={contenders}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=13_500)
    parser.add_argument("--epochs", type=float, default=5)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--contenders", default="flatout trainer-default trainer-best")
    parser.add_argument("--max-minutes", type=float, help="Begin no command after it.")
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flatout-") as name:
        folder = Path(name)
        make_job(folder, given.rows)
        make_conf(folder, given.epochs)
        asked = journey(given.turns, given.contenders)
        if given.max_minutes:
            asked.append(f"benchmark.max_minutes={given.max_minutes}")
        names = "split,tokenize,benchmark"
        seconds(kedro(folder, 42, *asked, pipelines=names), folder, shown=True)
        if given.keep:
            keep(folder / "data" / "08_reporting", given.keep)


def keep(reports: Path, target: Path) -> None:
    """What is read by people; no models, rows or caches."""
    for file in [*reports.glob("benchmark_*.*"), *reports.glob("benchmark.html")]:
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    for log in reports.glob("benchmark_logs/journey/*/log.txt"):
        shutil.copy(log, target / f"{log.parent.name}.txt")


if __name__ == "__main__":
    main()
