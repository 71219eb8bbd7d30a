"""What a start of training costs as the token rows grow: seconds and memory a rank.

    python -m tests.tools.scaling_rows --rows=10000,100000000 --folder=/tmp/rows

For each size a data folder: conf/test's corpus, split and tokenised, whose train tokens
are then replaced by rows made by machine, through the project's own writer. Sizes are
measured by turns, from the command to the line of the first step. Memory is anonymous
(RssAnon), of the process that has most: mapped files are the kernel's to drop.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from flatout.engine.files.arrow_folder import ArrowRecipe, write_recipe
from flatout.engine.files.atomic_folder import stored_key
from flatout.engine.files.content_key import ContentKey
from flatout.engine.rows.token_facts import TokenFacts

logger = logging.getLogger(__name__)
PROJECT = Path(__file__).parents[2]
BATCH_ROWS = 500_000
SHORTEST, LONGEST = 4, 12
FIRST_ID = 5
FIRST_STEP = re.compile(r"step 1/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="10000,100000000")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    sizes = [int(size) for size in options.rows.split(",")]
    for size in sizes:
        make_data(options.folder / str(size), size)
    for _ in range(options.turns):
        for size in sizes:
            found = start(options.folder / str(size), options.processes)
            logger.info(
                "%11s rows: %6.1f s (%5.1f s of cores), %5.2f GiB", f"{size:,}", *found
            )


@dataclass
class MachineRows(ArrowRecipe):
    """Rows of a few random ids, with the key of the rows whose place they take."""

    key: ContentKey
    rows: int
    vocabulary: int
    labels: int
    _facts: TokenFacts = field(default_factory=TokenFacts)

    @property
    def schema(self) -> Any:
        ids = pa.list_(pa.int32())
        return pa.schema(
            [("input_ids", ids), ("labels", pa.int64()), ("length", pa.int32())]
        )

    def facts(self) -> dict[str, Any]:
        return self._facts.as_dict()

    def batches(self) -> Iterator[Any]:
        for start_row in range(0, self.rows, BATCH_ROWS):
            count = min(BATCH_ROWS, self.rows - start_row)
            random = np.random.default_rng(start_row)
            lengths = random.integers(SHORTEST, LONGEST + 1, count, np.int32)
            offsets = np.zeros(count + 1, np.int32)
            np.cumsum(lengths, out=offsets[1:])
            ids = random.integers(FIRST_ID, self.vocabulary, offsets[-1], np.int32)
            lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))
            labels = pa.array(random.integers(0, self.labels, count))
            columns = [lists, labels, pa.array(lengths)]
            batch = pa.RecordBatch.from_arrays(columns, schema=self.schema)
            self._facts.add(batch)
            yield batch


def make_data(folder: Path, rows: int) -> None:
    """A data folder with `rows` train tokens; kept where it is there."""
    tokens = folder / "05_model_input/train_tokens"
    if (folder / "made").exists():
        return
    subprocess.run(_kedro("split,tokenize", folder), cwd=PROJECT, check=True)
    key = stored_key(tokens)
    assert key is not None
    names = json.loads((folder / "06_models/label_names.json").read_text())
    tokenizer = json.loads((folder / "06_models/tokenizer/tokenizer.json").read_text())
    size = len(tokenizer["model"]["vocab"])
    write_recipe(tokens, MachineRows(key, rows, size, len(names)))
    (folder / "made").touch()


def start(folder: Path, processes: int) -> tuple[float, float, float]:
    """Seconds from the command to the first step, on the clock and of all cores; and
    GiB of the largest process."""
    params = {
        "train.max_steps": 2,
        "train.log_every": 1,
        "train.resume": "never",
        "train.distributed.num_processes": processes,
    }
    begun = time.monotonic()
    command = _kedro("train", folder, **params)
    with subprocess.Popen(
        command,
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        memory = _Meter(process.pid)
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if FIRST_STEP.search(line):
                seconds = time.monotonic() - begun
                used = memory.stop()
                for _ in process.stdout:
                    pass
                return seconds, *used
        memory.stop()
    raise RuntimeError("".join(lines))


def _kedro(pipelines: str, folder: Path, **params: object) -> list[str]:
    pairs = {"data_dir": str(folder.absolute()), **params}
    text = ",".join(f"{name}={value}" for name, value in pairs.items())
    command = [sys.executable, "-m", "kedro", "run", "--env=test"]
    return [*command, f"--pipelines={pipelines}", f"--params={text}"]


class _Meter:
    """Largest anonymous memory of one process of a family, until `stop`; and the time
    of cores that the family used."""

    def __init__(self, pid: int) -> None:
        self._root, self._peak_bytes = psutil.Process(pid), 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> tuple[float, float]:
        self._stopped.set()
        self._thread.join()
        family = [self._root, *self._root.children(recursive=True)]
        times = [process.cpu_times() for process in family]
        own_s = sum(time.user + time.system for time in times)
        ended_s = sum(time.children_user + time.children_system for time in times)
        return own_s + ended_s, self._peak_bytes / 2**30

    def _watch(self) -> None:
        while not self._stopped.wait(0.05):
            try:
                family = [self._root, *self._root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            sizes = [_anonymous_bytes(process.pid) for process in family]
            self._peak_bytes = max(self._peak_bytes, *sizes)


def _anonymous_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return 1024 * int(found[1]) if found else 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main()
