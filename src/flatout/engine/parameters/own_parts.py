"""Import and check custom parts, which parameters specify by a dotted path such as
my_parts.my_metric."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import FunctionType
from typing import Any, NamedTuple

from flatout.engine.parameters.common import SettingsError
from flatout.engine.parameters.training import TrainSettings


class Call(NamedTuple):
    """The arguments with which flatout calls a part. Messages list them as `shown`."""

    shown: str
    arguments: tuple[Any, ...]
    named: Mapping[str, Any] = {}


SCHEDULE = Call("(step, total_steps)", (0, 1))
METRICS = Call("(predictions, labels)", (None, None))
CALLBACK = Call("(event, step, values)", ("log", 1, {}))


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
    """Return one line for each custom part that cannot be imported or called."""
    found = []
    for parameter, path, call in _named(train):
        try:
            part = own_part(path, parameter)
        except SettingsError as error:
            found.append(str(error))
            continue
        if fault := _call_fault(part, call):
            found.append(f"{parameter}: {path}{call.shown} cannot be called: {fault}")
    return found


def _named(train: TrainSettings) -> Iterator[tuple[str, str, Call]]:
    if is_own(train.optimizer):
        options = {"lr": train.learning_rate, **train.optimizer_options}
        shown = f"(params, {', '.join(f'{name}=...' for name in options)})"
        yield "train.optimizer", train.optimizer, Call(shown, ([],), options)
    if is_own(train.schedule):
        yield "train.schedule", train.schedule, SCHEDULE
    if train.compute_metrics is not None:
        yield "train.compute_metrics", train.compute_metrics, METRICS
    for path in train.callbacks:
        yield "train.callbacks", path, CALLBACK


def _call_fault(part: Any, call: Call) -> str:
    if not callable(part):
        return f"it is {part!r}"
    if isinstance(part, type) and call is CALLBACK:  # an instance is called
        own = (vars(kind).get("__call__") for kind in part.__mro__)
        method = next(filter(None, own), None)
        return _binding_fault(part) or _binding_fault(method, part, *call.arguments)
    return _binding_fault(part, *call.arguments, **call.named)


def override_faults(own: type, base: type) -> Iterator[str]:
    """Yield an error message for each method of `own` that overrides a value of `base`,
    or that cannot be called with the arguments of the method that it overrides."""
    for name, function in vars(base).items():
        given = inspect.getattr_static(own, name)
        if given is function or not isinstance(given, (FunctionType, staticmethod)):
            continue
        if not callable(function):
            yield f"{name} is a method: set it to a value, as Task does ({function!r})"
            continue
        found = inspect.signature(function).parameters.values()
        named = [p.name for p in found if p.kind is p.KEYWORD_ONLY]
        others = [p.name for p in found if p.name not in ("self", *named)]
        fault = _binding_fault(given.__get__(own, own), *others, **dict.fromkeys(named))
        if fault:
            yield f"{name}({', '.join([*others, *named])}) cannot be called: {fault}"


def _binding_fault(
    function: Callable[..., Any] | None, *arguments: Any, **named: Any
) -> str:
    """Return why calling `function` with these arguments would fail. Return an empty
    string if the call would succeed or the signature is unknown."""
    if function is None:
        return "its objects cannot be called"
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError as error:
        return str(error)
    except ValueError:  # compiled code without a signature
        return ""
    return ""
