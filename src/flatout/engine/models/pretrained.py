"""Load a checkpoint for a task, and keep its head if the label names match.

transformers keeps the order of the head's outputs but takes the label names from the
new config, so `positive, negative` can silently become `negative, positive`. This
module reorders the outputs to match the label names. If the label names differ, the
head is trained from scratch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, cast

import torch

from flatout.engine.parameters.faults import some_of

logger = logging.getLogger(__name__)


class BodyMismatch(ValueError):
    """Raised if weights below the head do not have the shapes that the config gives."""


def load_with_new_head(
    auto: Any, name: str, saved: Mapping[str, Any], **options: Any
) -> Any:
    """Load a model with `auto.from_pretrained` for the labels of `options["config"]`.
    `saved` is the config in the checkpoint. Weights that start from scratch are logged
    and listed in the model's attribute `new_weights`. Raises BodyMismatch if weights
    below the head do not fit. Errors of transformers are not caught."""
    config, then = options["config"], saved_labels(saved)
    now = [str(config.id2label[number]) for number in range(config.num_labels)]
    same, sized = list(range(len(now))), dict[str, int]()
    # If the numbers of labels differ, so do the head's shapes.
    places = _places(then, now, saved, config) if len(then) == len(now) else same
    if places != same:
        sized = label_dimensions(auto, config, options)
    model, new, reshaped = _loaded(auto, name, **options)
    sized = {key: dimension for key, dimension in sized.items() if key not in new}
    if (sized and places is None) or (reshaped and len(then) != len(now)):
        logger.warning(
            "%s has the labels %s, the data has %s: the head does not fit. If they "
            "mean the same, use the checkpoint's label names in the data",
            *(name, some_of(then), some_of(now)),
        )
        _initialise_layers(model, sized)
        new = sorted({*new, *sized})
    elif sized and places is not None:
        _move_rows(model, sized, places)
        logger.info("the head's outputs are those of %s, reordered by label name", name)
    if new:
        logger.warning(
            "not taken from %s, so they start from scratch: %s", name, ", ".join(new)
        )
    model.new_weights = new
    return model


def saved_labels(saved: Mapping[str, Any]) -> list[str]:
    """Return a checkpoint's label names in class order (LABEL_0, ... by default)."""
    named = saved.get("id2label")
    if named:
        return [str(named[key]) for key in sorted(named, key=int)]
    number = saved.get("num_labels") or 2  # transformers' default
    return [f"LABEL_{place}" for place in range(int(number))]


def _places(
    then: Sequence[str], now: Sequence[str], saved: Mapping[str, Any], config: Any
) -> list[int] | None:
    """Return the index in `then` of each label in `now`, or None if the labels do not
    match. `then` contains the checkpoint's labels, and `now` the data's labels."""
    kind, same = config.problem_type, list(range(len(now)))
    # transformers treats a single output without a problem type as regression.
    was = saved.get("problem_type") or ("regression" if len(then) == 1 else kind)
    if kind and "regression" in (kind, was):
        return same if kind == was else None
    numbers = [label.removeprefix("LABEL_") for label in then]
    for known, form in (
        (then, str),
        (then, lambda label: label.strip().casefold()),
        (numbers, str),
    ):
        number = {form(label): place for place, label in enumerate(known)}
        if len(number) == len(now) and number.keys() == {form(n) for n in now}:
            return [number[form(label)] for label in now]
    return None


def label_dimensions(
    auto: Any, config: Any, options: Mapping[str, Any]
) -> dict[str, int]:
    """Return the names of all tensors whose shape depends on the number of labels, each
    mapped to the dimension with that size. They are found by comparing the model with
    one that has one more label. Both models are built on the meta device."""
    shapes = []
    for more in (0, 1):
        own = deepcopy(config)
        own.num_labels = config.num_labels + more
        trusted = {"trust_remote_code": True} if options["trust_remote_code"] else {}
        with torch.device("meta"):
            model = auto.from_config(own, **trusted)
        shapes.append({key: t.shape for key, t in model.state_dict().items()})
    return {
        key: next(i for i, n in enumerate(shape) if n != shapes[1][key][i])
        for key, shape in shapes[0].items()
        if shape != shapes[1][key]
    }


@torch.no_grad()
def _move_rows(model: Any, sized: Mapping[str, int], places: Sequence[int]) -> None:
    state, order = model.state_dict(), torch.tensor(places)
    moved = {key: state[key].index_select(dim, order) for key, dim in sized.items()}
    for key, values in moved.items():
        state[key].copy_(values)


def _initialise_layers(model: Any, sized: Mapping[str, int]) -> None:
    """Initialise the layers of the tensors `sized` with the model's own method."""
    for path in {key.rpartition(".")[0] for key in sized}:
        layer = model.get_submodule(path)
        for parameter in layer.parameters(recurse=False):
            parameter._is_hf_initialized = False  # loading set it to True
        model._init_weights(layer)


def _loaded(auto: Any, name: str, **options: Any) -> tuple[Any, list[str], bool]:
    """Return the loaded model, the names of weights that do not come from the
    checkpoint, and whether the checkpoint has some of these with another shape."""
    kind, source = auto, cast("str | None", name)
    if "state_dict" in options:  # Auto classes accept it only with a name
        with torch.device("meta"):
            kind, source = type(auto.from_config(options["config"])), None
    with no_notes():
        model, info = kind.from_pretrained(
            source, ignore_mismatched_sizes=True, output_loading_info=True, **options
        )
    prefix = f"{model.base_model_prefix}."
    changed = {key: (then, now) for key, then, now in info["mismatched_keys"]}
    body = sorted(key for key in changed if key.startswith(prefix))
    if body:
        then, now = (tuple(shape) for shape in changed[body[0]])
        raise BodyMismatch(
            f"{body[0]} is {then} in the checkpoint and {now} by its config "
            f"({len(body)} weights differ): remove sizes from model.overrides"
        )
    return model, sorted({*changed, *info["missing_keys"]}), bool(changed)


@contextmanager
def no_notes() -> Iterator[None]:
    """Context manager that hides transformers' table of new weights, which flatout logs
    in one line."""
    from transformers.utils import logging as library

    before = library.get_verbosity()
    library.set_verbosity_error()
    try:
        yield
    finally:
        library.set_verbosity(before)
