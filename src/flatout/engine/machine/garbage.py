"""How often Python looks for garbage, rarely while modules are imported, and whether
the C library gives freed memory back.

torch, transformers and MLflow make a million objects that stay. To look through them
again and again, as Python's own thresholds have it, takes 1.4 s of a start's 6 s
(measured after kedro and MLflow were there, on 2 cores).
"""

from __future__ import annotations

import atexit
import ctypes
import gc

RARELY = 100_000
"""New objects between two looks at the youngest."""
_usual = gc.get_threshold()
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""glibc's numbers for `mallopt`."""
KEPT_BYTES = 2**30
"""Larger ones go back to the system when they are freed."""


def collect_rarely() -> None:
    """Until `collect_as_usual`: for a process that is about to import torch. What is
    there at its end goes with the process: Python would look through all of it."""
    atexit.register(gc.freeze)
    gc.set_threshold(RARELY, *_usual[1:])


def collect_as_usual() -> None:
    """Before the first step: garbage may hold memory of the device."""
    gc.set_threshold(*_usual)


def keep_freed_memory() -> bool:
    """For steps on a CPU, which free and take the same tensors again and again: glibc
    gives each back to the system, which then clears its pages again, a page fault for
    each 4 KiB. False where the C library is another one."""
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is None:
        return False
    options = (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD)
    return all(change(option, KEPT_BYTES) == 1 for option in options)
