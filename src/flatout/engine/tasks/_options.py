"""Check that a task supports the configured training options. No rows are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

import pyarrow as pa

from flatout.engine.parameters import (
    ModelSettings,
    Settings,
    SettingsError,
    TrainSettings,
    near_or_all,
)
from flatout.engine.parameters.faults import some_of
from flatout.engine.parameters.own_parts import own_part_faults
from flatout.engine.tasks._labels import calibration_faults
from flatout.engine.tasks._task import HeadKind, LossOptions, Task


def option_faults(settings: Settings, task: type[Task]) -> list[str]:
    """Return one message for each parameter that `task` does not support."""
    faults = [*_unused_options(settings, task), *calibration_faults(settings, task)]
    return faults + own_part_faults(settings.train)


def _unused_options(settings: Settings, task: type[Task]) -> Iterator[str]:
    train, name = settings.train, settings.model.task
    valid = ", ".join(sorted(task.takes_options)) or "none"
    for option in (one.name for one in fields(LossOptions)):
        if getattr(train, option) and option not in task.takes_options:
            yield f"train.{option}: {name} does not use it (valid: {valid})"
    if train.audit and task.label_type != pa.string():
        yield (
            f"train.audit: rows of {name} do not have one class each, which could be "
            "wrong; set it to false. kedro flatout rows --step N --replay shows the "
            "loss of each row"
        )
    figure, known = train.metric, figures_of(settings.model, task)
    if train.compute_metrics is None and figure is not None and figure not in known:
        near = near_or_all(figure, known, "")
        yield f"train.metric: {name} has no metric {figure!r}; {near}"
    of_pieces = task.head_kind in (HeadKind.VOCABULARY, HeadKind.DIRECTIONS)
    if train.compute_metrics is not None and of_pieces:
        yield (
            f"train.compute_metrics: predictions of {name} are a score for each piece "
            "of the vocabulary at each target, too large for the memory: give the task "
            "its own metrics (docs/own_task.md)"
        )
    if task.whole_batch and train.global_batch_size == 1:
        yield (
            f"train.global_batch_size=1: {name} compares the samples of a global batch "
            "with one another; set it to at least 2"
        )


def figures_of(model: ModelSettings, task: type[Task]) -> dict[str, bool]:
    """Return the names of a task's metrics, including those of each size in
    `model.matryoshka`, mapped to whether higher values are better."""
    sizes = model.matryoshka if task.texts.form == "pairs" else []
    own = {name: higher for name, higher in task.figures.items() if name != "loss"}
    found = dict(task.figures)
    for size in sizes:
        found |= {f"{name}_dim_{size}": higher for name, higher in own.items()}
    return found


def higher_is_better(settings: Settings, task: type[Task], figure: str) -> bool:
    """Return whether higher values of the built-in or custom `figure` are better."""
    if figure in (known := figures_of(settings.model, task)):
        return known[figure]
    given = settings.train.greater_is_better
    return not figure.endswith("loss") if given is None else given


def loss_options(
    train: TrainSettings, label_names: Sequence[str], label_counts: Mapping[str, int]
) -> LossOptions:
    """Return the options of the training loss. `label_counts` maps class numbers (as
    strings) to train rows. Raises SettingsError if class weights do not fit."""
    weights = _class_weights(train, label_names, label_counts)
    if weights is not None and not any(weights):
        raise SettingsError(
            "train.class_weights: all weights are 0, so the model would learn nothing: "
            "give at least one class a weight above 0"
        )
    return LossOptions(weights, train.label_smoothing, train.focal_gamma)


def _class_weights(
    train: TrainSettings, names: Sequence[str], counts: Mapping[str, int]
) -> tuple[float, ...] | None:
    given = train.class_weights
    if given is None:
        return None
    if given == "balanced":
        return _balanced(names, counts)
    if isinstance(given, Mapping):
        if unknown := [name for name in given if name not in names]:
            near = near_or_all(unknown[0], names, "")
            if unknown[0] in ("True", "False"):
                near += ". YAML reads yes and no as true and false: put them in quotes"
            raise SettingsError(
                f"train.class_weights: no class is called {unknown[0]!r}; {near}"
            )
        return tuple(given.get(name, 1.0) for name in names)
    if len(given) != len(names):
        raise SettingsError(
            f"train.class_weights has {len(given)} weights for {len(names)} classes: "
            f"one each, in the order {list(names)}, or a mapping by their names"
        )
    return tuple(map(float, given))


def _balanced(names: Sequence[str], counts: Mapping[str, int]) -> tuple[float, ...]:
    """Return the weights of scikit-learn: rows / (classes * rows of the class)."""
    found = {name: counts.get(str(k), 0) for k, name in enumerate(names)}
    if not any(found.values()):
        raise SettingsError(
            "train.class_weights: balanced needs one class per row; give one weight "
            "per class, for example {a: 1.0, b: 2.5}"
        )
    if absent := [name for name, count in found.items() if not count]:
        raise SettingsError(
            f"train.class_weights: balanced needs train rows of every class; "
            f"{len(absent)} of {len(names)} have no row ({some_of(absent)}): give one "
            "weight per class, for example {a: 1.0, b: 2.5}"
        )
    rows = sum(found.values())
    return tuple(rows / (len(names) * count) for count in found.values())
