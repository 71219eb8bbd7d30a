"""How fast token rows are made, against the ways people know. Both sides in one run.

    python -m tests.tools.tokenizing --rows=100000

Sides, on the same rows, tokenizer and cores, medians of `--repeats` rounds in which
every side has its turn:

- flatout: rows on the disk -> token rows on the disk;
- datasets.map(tokenizer, batched=True), its defaults, and over `num_proc`;
- bare encode_batch_fast, texts in memory already, nothing stored: the ceiling.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from flatout.engine.families import usable_positions
from flatout.engine.files.arrow_folder import TableRecipe, write_recipe
from flatout.engine.files.atomic_folder import write_whole
from flatout.engine.machine.environment import tokenizer_parallelism, usable_cores
from flatout.engine.parameters import ModelSettings, TokenizeSettings
from flatout.engine.tokenizing.token_recipes import tokens_recipe
from flatout.engine.tokenizing.tokenizer import TokenizerFile, tokenizer_recipe

logger = logging.getLogger(__name__)
MODEL = ModelSettings(config={"model_type": "bert"})
TOKENIZE = TokenizeSettings()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--corpus", type=Path, help="folder that keeps the docstrings")
    options = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(message)s")
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), options.corpus, options.rows, options.repeats)


def compare(folder: Path, corpus: Path | None, rows: int, repeats: int) -> None:
    """Print rows/s of each side and flatout's ratio to it."""
    made = corpus_rows(corpus or folder / "raw", rows)
    write_recipe(folder / "rows", TableRecipe(made))
    stored = datasets.load_from_disk(str(folder / "rows"))
    recipe = tokenizer_recipe(stored, MODEL, TOKENIZE, usable_positions)
    write_whole(folder / "tokenizer", recipe.key, recipe.write)
    sides = _sides(folder, stored, TokenizerFile(folder / "tokenizer"))
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            started = time.perf_counter()
            side()
            rates[name].append(len(stored) / (time.perf_counter() - started))
    _print(rates, len(stored))


def corpus_rows(folder: Path, rows: int) -> pa.Table:
    """`rows` docstrings; where there are not so many, some are varied by a word."""
    from flatout.datasets import DocstringCorpus

    corpus = DocstringCorpus(filepath=str(folder), rows=None, labels=12).load()
    texts: list[str] = corpus["text"][:]
    copies = -(-rows // len(texts))
    varied = [
        text if copy == 0 else f"copy {copy} {text}"
        for copy in range(copies)
        for text in texts
    ]
    return pa.table({"text": varied[:rows]})


def _sides(
    folder: Path, rows: Any, tokenizer: TokenizerFile
) -> dict[str, Callable[[], None]]:
    from transformers import AutoTokenizer

    fast = AutoTokenizer.from_pretrained(str(tokenizer.folder))

    def flatout() -> None:
        shutil.rmtree(folder / "tokens", ignore_errors=True)
        made = tokens_recipe("tokens", rows, tokenizer, [], _LM, TOKENIZE)
        write_recipe(folder / "tokens", made)

    def encode(batch: dict[str, Any]) -> Any:
        return fast(batch["text"], truncation=True, max_length=TOKENIZE.max_length)

    def map_over(processes: int | None) -> None:
        shutil.rmtree(folder / "theirs", ignore_errors=True)
        with tokenizer_parallelism(processes is None):
            mapped = rows.map(
                encode,
                batched=True,
                num_proc=processes,
                remove_columns=["text"],
                load_from_cache_file=False,
            )
            mapped.save_to_disk(str(folder / "theirs"))

    texts = rows["text"][:]

    def bare() -> None:
        backend = TokenizerFile(tokenizer.folder).backend
        backend.enable_truncation(TOKENIZE.max_length)
        with tokenizer_parallelism(True):
            for start in range(0, len(texts), 10_000):
                backend.encode_batch_fast(texts[start : start + 10_000])

    sides: dict[str, Callable[[], None]] = {
        "flatout": flatout,
        "datasets.map, defaults": lambda: map_over(None),
    }
    for processes in _process_counts():
        sides[f"datasets.map, num_proc={processes}"] = lambda n=processes: map_over(n)
    return {**sides, "bare encode_batch_fast": bare}


_LM = MODEL.model_copy(update={"task": "masked-lm"})


def _process_counts() -> list[int]:
    """2, 4, ... up to the usable cores, and those."""
    cores = usable_cores()
    powers = [2**power for power in range(1, 10) if 2**power < cores]
    return [*powers, cores]


def _print(rates: dict[str, list[float]], rows: int) -> None:
    median = {name: statistics.median(found) for name, found in rates.items()}
    lines = [f"{rows:,} docstrings, {usable_cores()} cores; medians of rows/s"]
    for name, rate in median.items():
        spread = f"{min(rates[name]):,.0f} to {max(rates[name]):,.0f}"
        ratio = median["flatout"] / rate
        lines.append(f"{name:28} {rate:>10,.0f}  ({spread})  flatout x {ratio:.2f}")
    logger.info("\n".join(lines))


if __name__ == "__main__":
    main()
