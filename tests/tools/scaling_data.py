"""Time and memory of split and tokenize as the data grows: 1x, 4x, 16x.

    python -m tests.tools.scaling_data --rows=5000000

Short rows are made from the docstrings' lines, each varied by a number, and written as
Parquet shards. Each size is split and tokenised in a process of its own, whose peak
memory (helper processes included) is read against that after its imports. The largest
size is then run once more, unchanged, to time what keeping costs.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from flatout.datasets import (
    KeyedArrowDataset,
    KeyedJSONDataset,
    KeyedParquetDataset,
    TokenizerFolder,
)
from flatout.engine.data.columns import Columns
from flatout.engine.data.readers.text_files import TextFiles
from flatout.engine.data.row_facts import SPLITS
from flatout.engine.data.split_recipes import plan_split
from flatout.engine.families import usable_positions
from flatout.engine.parameters import (
    ModelSettings,
    SplitSettings,
    TokenizeSettings,
    TrainSettings,
)
from flatout.engine.tasks import task_class
from flatout.engine.tokenizing.statistics import token_report
from flatout.engine.tokenizing.token_recipes import label_names_of, tokens_recipe
from flatout.engine.tokenizing.tokenizer import TokenizerFile, tokenizer_recipe

logger = logging.getLogger(__name__)
MODEL = ModelSettings(config={"model_type": "bert"})
TOKENIZE = TokenizeSettings()
SHARD_ROWS = 250_000
GIB = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--corpus", type=Path, help="folder that keeps the docstrings")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.basicConfig(level="WARNING", format="%(message)s")
    logger.setLevel("INFO")
    if options.measure is not None:
        sys.stdout.write(json.dumps(measure(options.measure)) + "\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), options.corpus, options.rows)


def compare(folder: Path, corpus: Path | None, rows: int) -> None:
    """Print seconds, GiB and rows/s of a sixteenth, a quarter and all of `rows`."""
    lines = _short_lines(corpus or folder / "corpus")
    sizes = [rows // 16, rows // 4, rows]
    for size in [*sizes, rows]:
        data = folder / str(size)
        again = data.exists()
        if not again:
            write_rows(data / "raw", lines, size)
        found = _in_process_of_its_own(data)
        logger.info(
            "%9s rows%s: %7.2f s (split %.2f, tokenize %.2f), %6.0f thousand rows/s, "
            "peak %.2f GiB above the imports",
            f"{size:,}",
            ", unchanged" if again else "",
            found["split_s"] + found["tokenize_s"],
            found["split_s"],
            found["tokenize_s"],
            size / (found["split_s"] + found["tokenize_s"]) / 1e3,
            found["peak_gib"],
        )


def _short_lines(corpus: Path) -> list[tuple[str, str]]:
    """Lines of docstrings of at least three words, with their label."""
    from flatout.datasets import DocstringCorpus

    rows = DocstringCorpus(filepath=str(corpus), rows=12_000, labels=10).load()
    return [
        (line.strip(), label)
        for text, label in zip(rows["text"][:], rows["label"][:], strict=True)
        for line in text.splitlines()
        if len(line.split()) >= 3
    ]


def write_rows(folder: Path, lines: list[tuple[str, str]], rows: int) -> None:
    """`rows` distinct short rows as Parquet shards."""
    folder.mkdir(parents=True)
    for start in range(0, rows, SHARD_ROWS):
        numbers = range(start, min(start + SHARD_ROWS, rows))
        picked = [lines[number % len(lines)] for number in numbers]
        texts = [f"{text} {n}" for n, (text, _) in zip(numbers, picked, strict=True)]
        table = pa.table({"text": texts, "label": [label for _, label in picked]})
        pq.write_table(table, folder / f"{start:09d}.parquet")


def _in_process_of_its_own(data: Path) -> dict[str, float]:
    command = [sys.executable, "-m", __spec__.name, f"--measure={data}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(data: Path) -> dict[str, float]:
    """Split and tokenise the shards in `data`; seconds and GiB."""
    import datasets
    import transformers  # noqa: F401 - its imports are not what is measured

    datasets.disable_progress_bars()
    with _PeakMemory() as memory:
        started = time.perf_counter()
        _split(data)
        middle = time.perf_counter()
        _tokenize(data)
        ended = time.perf_counter()
    return {
        "split_s": middle - started,
        "tokenize_s": ended - middle,
        "peak_gib": memory.peak_bytes / GIB,
    }


def _split(data: Path) -> None:
    settings = SplitSettings()
    columns = Columns.of(settings, task_class(MODEL.task).label_type, MODEL.task)
    recipes = plan_split(TextFiles(data / "raw"), columns, settings)
    KeyedParquetDataset(filepath=str(data / "rejected.parquet")).save(
        recipes["rejected_rows"]
    )
    for name in SPLITS:
        _stored(data, f"{name}_rows").save(recipes[f"{name}_rows"])
    KeyedJSONDataset(filepath=str(data / "split_report.json")).save(
        recipes["split_report"]
    )


def _tokenize(data: Path) -> None:
    rows = {name: _stored(data, f"{name}_rows").load() for name in SPLITS}
    folder = TokenizerFolder(filepath=str(data / "tokenizer"))
    folder.save(tokenizer_recipe(rows["train"], MODEL, TOKENIZE, usable_positions))
    tokenizer, names = TokenizerFile(data / "tokenizer"), label_names_of(rows["train"])
    for name, part in rows.items():
        recipe = tokens_recipe(name, part, tokenizer, names, MODEL, TOKENIZE)
        _stored(data, f"{name}_tokens").save(recipe)
    tokens = {name: _stored(data, f"{name}_tokens").load() for name in SPLITS}
    report = token_report(tokens, tokenizer, TrainSettings(), TOKENIZE)
    KeyedJSONDataset(filepath=str(data / "token_report.json")).save(report)


def _stored(data: Path, name: str) -> KeyedArrowDataset:
    return KeyedArrowDataset(filepath=str(data / name))


class _PeakMemory:
    """Most memory of this process and its helpers above what it had at the start."""

    def __enter__(self) -> _PeakMemory:
        self._process = psutil.Process()
        self._start_bytes = self._process.memory_info().rss
        self.peak_bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            self.peak_bytes = max(self.peak_bytes, self._now() - self._start_bytes)

    def _now(self) -> int:
        return sum(_rss(p) for p in [self._process, *self._process.children()])

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.peak_bytes = max(self.peak_bytes, own - self._start_bytes)


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


if __name__ == "__main__":
    main()
