"""A table as guide E's tool reads it: numbers and classes in one HDF5 file.

    python -m tests.tools.guide_e_table data/01_raw/guide_e.h5

Classes are those of a random layer of tanh, so that a model can learn them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import h5py
import numpy as np


def write(file: Path, rows: int, columns: int, classes: int) -> None:
    """`inputs` (rows, columns) and `label` (rows,)."""
    generator = np.random.default_rng(0)
    values = generator.normal(size=(rows, columns)).astype(np.float32)
    mixed = np.tanh(values @ generator.normal(size=(columns, 32)) / 4)
    labels = (mixed @ generator.normal(size=(32, classes))).argmax(1)
    file.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(file, "w") as opened:
        opened["inputs"], opened["label"] = values, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--columns", type=int, default=64)
    parser.add_argument("--classes", type=int, default=10)
    asked = parser.parse_args()
    write(asked.file, asked.rows, asked.columns, asked.classes)


if __name__ == "__main__":
    main()
