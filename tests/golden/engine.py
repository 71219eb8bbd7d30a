"""All imports of the golden record from flatout, because modules may be moved."""

from importlib import import_module
from typing import Any


def _found(name: str, *modules: str) -> Any:
    """Return `name` from the first of the engine's `modules` that contains it."""
    for module in modules:
        try:
            return getattr(import_module(f"flatout.engine.{module}"), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"none of {', '.join(modules)} has {name}")


parse_settings = _found("parse_settings", "parameters")
DistributedSettings = _found("DistributedSettings", "parameters")
RuntimeSettings = _found("RuntimeSettings", "parameters")
TokenRows = _found("TokenRows", "rows.tokens")
ArrayRows = _found("ArrayRows", "rows.arrays")
Vocabulary = _found("Vocabulary", "rows.vocabulary")
TrainJob = _found("TrainJob", "train.setup.job", "train.job")
train = _found("train", "train.loop")
Stepper = _found("Stepper", "train.step")
set_up = _found("set_up", "machine.runtime")
ProcessGroup = _found("ProcessGroup", "train.process_group")
