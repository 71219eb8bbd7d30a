"""Compute text vectors, store them for later runs, and search them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
import xxhash

from flatout.engine.files.atomic_write import clear_leftovers, write_file
from flatout.engine.files.content_key import arrow_digest
from flatout.engine.machine.runtime import exact_products
from flatout.engine.rows.layout import Ints

logger = logging.getLogger(__name__)

TEXTS_A_FILE = 16_384
Vectors = npt.NDArray[np.float32]


def stored_vectors(
    texts: Any, encode: Callable[[Any], Vectors], folder: Path, key: str
) -> list[Vectors]:
    """Return the vectors of `texts`, an Arrow array, as memory-mapped arrays of
    TEXTS_A_FILE rows each. Vectors that are not yet in `folder` are computed with
    `encode` and stored there. Files for other texts, or for a model with another `key`,
    are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    clear_leftovers(folder)
    paths, made, count = [], 0, f"{len(texts):,}"
    for start in range(0, len(texts), TEXTS_A_FILE):
        part = texts[start : start + TEXTS_A_FILE]
        content = arrow_digest([pa.RecordBatch.from_arrays([part], ["text"])])
        name = xxhash.xxh3_128_hexdigest(f"{key} {content}".encode())
        paths.append(folder / f"{name}.npy")
        if not paths[-1].is_file():
            write_file(paths[-1], partial(_save, encode(part)))
            made += len(part)
            logger.info("vectors: %s of %s", f"{start + len(part):,}", count)
    for other in set(folder.glob("*.npy")) - set(paths):
        other.unlink()
    logger.info("vectors of %s texts: %s were made", count, f"{made:,}")
    return [np.load(path, mmap_mode="r") for path in paths]


def _save(vectors: Vectors, path: Path) -> None:
    with path.open("wb") as opened:
        np.save(opened, vectors)


def chosen(parts: list[Vectors], numbers: Ints) -> Vectors:
    """Return the vectors (n, H) of the texts with the given `numbers` (n,). `parts` is
    a result of `stored_vectors`."""
    found = np.empty((len(numbers), parts[0].shape[1]), np.float32)
    at, rows = np.divmod(numbers, TEXTS_A_FILE)
    for part in np.unique(at).tolist():
        found[at == part] = parts[part][rows[at == part]]
    return found


def best(
    queries: Vectors,
    parts: list[Vectors],
    size: int,
    most: int,
    left_out: Ints,
    device: torch.device,
) -> tuple[Vectors, Ints]:
    """Return the scores and numbers (Q, most) of the largest dot products of `queries`
    (Q, H) with the first `size` vectors in `parts`, best first. `left_out` (2, n)
    contains pairs of a query and a vector number to ignore. Missing scores are -inf."""
    own = torch.from_numpy(queries).to(device)
    scores = own.new_full((len(queries), most), -torch.inf)
    numbers = torch.zeros_like(scores, dtype=torch.int64)
    with exact_products():
        for start in range(0, size, TEXTS_A_FILE):
            part = parts[start // TEXTS_A_FILE][: size - start]
            found = own @ torch.from_numpy(np.array(part)).to(device).T
            inside = (left_out[1] >= start) & (left_out[1] < start + len(part))
            query, number = torch.from_numpy(left_out[:, inside]).to(device)
            found[query, number - start] = -torch.inf
            top, at = found.topk(min(most, len(part)))
            scores, order = torch.cat([scores, top], 1).topk(most)
            numbers = torch.cat([numbers, at + start], 1).gather(1, order)
    return scores.cpu().numpy(), numbers.cpu().numpy()
