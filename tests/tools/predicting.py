"""How fast a saved model is applied, against transformers. Both sides in one run.

    python -m tests.tools.predicting --model=data/06_models/model --rows=2000

Sides, on the same model, texts, device and cores, medians of `--repeats` rounds in
which every side has its turn:

- flatout: texts in memory -> label, score and all probabilities of each;
- transformers.pipeline("text-classification"), at its default batch of 1, and at 32.

Texts are docstrings, cut at `--max-length` tokens on all sides. Ends with status 1
where labels differ from those of the defaults.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from flatout.engine.machine import environment
from flatout.engine.parameters import Settings, parse_settings

logger = logging.getLogger(__name__)

THEIRS = "transformers.pipeline, defaults"
Side = Callable[[pa.Table], Any]
"""Texts (N,) -> probabilities (N, classes)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("data/06_models/model"))
    parser.add_argument("--rows", type=int, default=2_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-length", type=int, default=320)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--corpus", type=Path, help="folder that keeps the docstrings")
    options = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(message)s")
    settings = parse_settings(
        {
            "runtime": {"precision": options.precision, "tf32": False},
            "tokenize": {"max_length": options.max_length},
        }
    )
    environment.apply(settings.runtime)  # before torch is imported
    with tempfile.TemporaryDirectory() as folder:
        texts = _texts(options.corpus or Path(folder), options.rows)
    same = compare(options.model, texts, settings, options.repeats)
    raise SystemExit(0 if same else 1)


def compare(folder: Path, texts: pa.Table, settings: Settings, repeats: int) -> bool:
    """Print rows/s and how far the sides differ; whether labels are the same."""
    sides = _sides(folder, settings)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    found: dict[str, Any] = {}
    for side in sides.values():
        side(texts.slice(0, 64))  # warm-up
    for _ in range(repeats):
        for name, side in sides.items():
            started = time.perf_counter()
            found[name] = side(texts)
            rates[name].append(len(texts) / (time.perf_counter() - started))
    _print_rates(rates, len(texts))
    ours, theirs = found["flatout"], found[THEIRS]
    different = int((ours.argmax(1) != theirs.argmax(1)).sum())
    distance = np.abs(ours - theirs).max()
    logger.info(
        "labels other than by defaults: %d of %d; largest difference of a probability: "
        "%.1e",
        *(different, len(texts), distance),
    )
    return not different


def _texts(folder: Path, rows: int) -> pa.Table:
    from flatout.datasets import DocstringCorpus

    corpus = DocstringCorpus(filepath=str(folder), rows=rows, labels=10).load()
    return pa.table({"text": corpus["text"][:]})


def _sides(folder: Path, settings: Settings) -> dict[str, Side]:
    theirs = _theirs(folder, settings)
    return {
        "flatout": _flatout(folder, settings),
        THEIRS: theirs,
        "transformers.pipeline, batch_size=32": lambda texts: theirs(texts, 32),
    }


def _flatout(folder: Path, settings: Settings) -> Side:
    from flatout.engine.data.raw_texts import open_raw_texts
    from flatout.engine.models.building import load_pretrained
    from flatout.engine.predict.predicting import Predictions
    from flatout.engine.predict.predictor import Predictor
    from flatout.engine.tokenizing.tokenizer import TokenizerFile

    predictor = Predictor(load_pretrained(folder), TokenizerFile(folder), settings)

    def side(texts: pa.Table) -> Any:
        made = Predictions(open_raw_texts(texts), predictor, settings.predict)
        table = pa.Table.from_batches(made.batches(), made.schema)
        names = [f"probability_{name}" for name in predictor.label_names]
        return np.stack([table.column(name).to_numpy() for name in names], axis=1)

    return side


def _theirs(folder: Path, settings: Settings) -> Callable[..., Any]:
    import torch
    from transformers import pipeline

    from flatout.engine.machine.runtime import DTYPES, set_up

    device = set_up(settings.runtime).device
    dtype = DTYPES[str(settings.runtime.precision)]
    ask = pipeline("text-classification", str(folder), device=device, dtype=dtype)
    order = list(ask.model.config.id2label.values())
    cut = {"truncation": True, "max_length": settings.tokenize.max_length}

    def side(texts: pa.Table, batch_size: int = 1) -> Any:
        with torch.inference_mode():
            answers = ask(
                texts.column("text").to_pylist(),
                top_k=None,
                batch_size=batch_size,
                **cut,
            )
        shares = [{a["label"]: a["score"] for a in answer} for answer in answers]
        return np.array([[share[name] for name in order] for share in shares])

    return side


def _print_rates(rates: dict[str, list[float]], rows: int) -> None:
    median = {name: statistics.median(found) for name, found in rates.items()}
    cores = environment.usable_cores()
    logger.info("%s docstrings, %d cores; medians of rows/s", f"{rows:,}", cores)
    for name, rate in median.items():
        spread = f"{min(rates[name]):,.0f} to {max(rates[name]):,.0f}"
        ratio = f"flatout x {median['flatout'] / rate:.2f}"
        logger.info("%s %s", f"{name:36} {rate:>8,.0f}", f"({spread})  {ratio}")


if __name__ == "__main__":
    main()
