"""Import custom parts, which parameters specify by a dotted path such as
my_parts.my_metric."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from flatout.engine.parameters.common import SettingsError
from flatout.engine.parameters.training import TrainSettings


def is_own(name: str | None) -> bool:
    """Return whether `name` is a dotted path rather than one of flatout's own names."""
    return name is not None and "." in name


def own_part(path: str, parameter: str) -> Any:
    """Import the object at `path`, or raise a SettingsError that names `parameter`."""
    module, _, name = path.rpartition(".")
    try:
        if not module:
            raise ImportError("it names no module")
        return getattr(import_module(module), name)
    except Exception as error:  # importing runs the module, so any error is possible
        raise SettingsError(
            f"{parameter}: {path!r} cannot be imported ({error}): give the dotted path "
            "of an object in a module on the Python path, e.g. my_package.module.name"
        ) from error


def own_part_faults(train: TrainSettings) -> list[str]:
    """Return one line for each custom part that cannot be imported."""
    own = {"optimizer": train.optimizer, "schedule": train.schedule}
    named = [(name, path) for name, path in own.items() if is_own(path)]
    if train.compute_metrics is not None:
        named.append(("compute_metrics", train.compute_metrics))
    found = []
    for name, path in (*named, *(("callbacks", path) for path in train.callbacks)):
        try:
            own_part(path, f"train.{name}")
        except SettingsError as error:
            found.append(str(error))
    return found
