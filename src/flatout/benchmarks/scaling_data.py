"""Time and memory of split and tokenize as the data grows: 1x, 4x, 16x.

    python -m flatout.benchmarks.scaling_data --rows=5000000

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
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

logger = logging.getLogger(__name__)
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
    """Run both pipelines on the shards in `data`; seconds and GiB."""
    import datasets
    import transformers  # noqa: F401
    from kedro.runner import SequentialRunner

    from flatout.pipelines import split, tokenize

    datasets.disable_progress_bars()
    catalog = _catalog(data)
    with _PeakMemory() as memory:
        started = time.perf_counter()
        SequentialRunner().run(split.create_pipeline(), catalog)
        middle = time.perf_counter()
        SequentialRunner().run(tokenize.create_pipeline(), catalog)
        ended = time.perf_counter()
    return {
        "split_s": middle - started,
        "tokenize_s": ended - middle,
        "peak_gib": memory.peak_bytes / GIB,
    }


def _catalog(data: Path) -> Any:
    """The project's own entries, on the shards in `data`."""
    from kedro.config import OmegaConfigLoader
    from kedro.io import DataCatalog, MemoryDataset

    from flatout.datasets import TextFiles

    loader = OmegaConfigLoader(
        conf_source=str(Path(__file__).parents[3] / "conf"),
        base_env="base",
        default_run_env="base",
        runtime_params={"data_dir": str(data)},
        custom_resolvers={"project_path": str},
    )
    names = {"rejected_rows", "split_report", "token_report", "token_figure"}
    names |= {f"{s}_{k}" for s in _SPLITS for k in ("rows", "tokens")}
    names |= {"tokenizer", "tokenizer_file", "label_names"}
    entries = {name: loader["catalog"][name] for name in names}
    catalog = DataCatalog.from_config(entries)
    catalog["raw_texts"] = TextFiles(filepath=str(data / "raw"))
    parameters = loader["parameters"]
    for name in ("split", "model", "tokenize", "train"):
        catalog[f"params:{name}"] = MemoryDataset(parameters[name])
    catalog["params:model.task"] = MemoryDataset(parameters["model"]["task"])
    return catalog


_SPLITS = ("train", "validation", "test")


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
