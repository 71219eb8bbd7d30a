"""Configure Python's garbage collection, and how the C library returns freed memory.

Importing torch, transformers and MLflow creates a million permanent objects. With
Python's default thresholds, scanning them repeatedly takes 1.4 s of a 6 s start-up
(measured after importing Kedro and MLflow, on 2 cores).
"""

from __future__ import annotations

import atexit
import ctypes
import gc

RARELY = 100_000
"""The number of new objects that triggers a collection of the youngest generation."""
_usual = gc.get_threshold()
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""The values of the constants with these names in glibc's malloc.h."""
KEPT_BYTES = 2**30
"""Only freed blocks of more than this many bytes are returned to the system."""


def collect_rarely() -> None:
    """Collect garbage less often until `collect_as_usual` is called. Call this before
    importing torch. At exit, objects are frozen to avoid a final collection."""
    atexit.register(gc.freeze)
    gc.set_threshold(RARELY, *_usual[1:])


def collect_as_usual() -> None:
    """Restore the default thresholds, because garbage can occupy device memory."""
    gc.set_threshold(*_usual)


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory. Return False if this is not possible. Training
    steps on a CPU allocate the same sizes repeatedly, and memory that was returned to
    the system would cost a page fault per 4 KiB."""
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is None:
        return False
    options = (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD)
    return all(change(option, KEPT_BYTES) == 1 for option in options)
