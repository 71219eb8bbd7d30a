"""Frequency of Python's garbage collection, and how the C library returns memory.

torch, transformers and MLflow create a million objects that stay. With Python's own
thresholds, scanning them repeatedly costs 1.4 s of the 6 s of a start (measured after
the import of Kedro and MLflow, on 2 cores).
"""

from __future__ import annotations

import atexit
import ctypes
import gc

RARELY = 100_000
"""Number of new objects between two collections of the youngest generation."""
_usual = gc.get_threshold()
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Option numbers of glibc's `mallopt`."""
KEPT_BYTES = 2**30
"""Larger blocks are returned to the system when they are freed."""


def collect_rarely() -> None:
    """Collect rarely until `collect_as_usual`: for a process that will import torch. At
    exit objects are frozen, because a last collection would scan them all."""
    atexit.register(gc.freeze)
    gc.set_threshold(RARELY, *_usual[1:])


def collect_as_usual() -> None:
    """Restore the thresholds: garbage may occupy device memory during steps."""
    gc.set_threshold(*_usual)


def keep_freed_memory() -> bool:
    """Keep freed memory in the process: steps on a CPU free and allocate the same
    tensors repeatedly, and glibc would return each to the system, at a page fault per 4
    KiB. Return False if the C library is not glibc."""
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is None:
        return False
    options = (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD)
    return all(change(option, KEPT_BYTES) == 1 for option in options)
