"""How often Python looks for garbage: rarely while modules are imported.

torch, transformers and MLflow make a million objects that stay. To look through them
again and again, as Python's own thresholds have it, takes 1.4 s of a start's 6 s
(measured after kedro and MLflow were there, on 2 cores).
"""

from __future__ import annotations

import atexit
import gc

RARELY = 100_000
"""New objects between two looks at the youngest."""
_usual = gc.get_threshold()


def collect_rarely() -> None:
    """Until `collect_as_usual`: for a process that is about to import torch. What is
    there at its end goes with the process: Python would look through all of it."""
    atexit.register(gc.freeze)
    gc.set_threshold(RARELY, *_usual[1:])


def collect_as_usual() -> None:
    """Before the first step: garbage may hold memory of the device."""
    gc.set_threshold(*_usual)
