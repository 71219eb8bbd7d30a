"""The Optuna study that a sweep goes on with, and whether it is the same sweep."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.study import Study

import flatout
from flatout.engine.benchmark.recommend import versions
from flatout.engine.files.own_code import digest_of, sources_of
from flatout.engine.parameters import ModelSettings, Settings, SweepSettings
from flatout.engine.parameters.secrets import without_password
from flatout.engine.sweep.queued import fail_running, queue_again
from flatout.engine.sweep.space import objective
from flatout.engine.sweep.storage import StorageError, database_file
from flatout.engine.train.setup.identity import result_identity
from flatout.engine.train.setup.job import TrainJob

IDENTITY = "identity"
CREATOR_TAKES_S = 10


def open_study(job: TrainJob, storage: Any) -> Study:
    """Begun or gone on with, everything to try in its queue. Raises StorageError if the
    study has another identity."""
    options, wanted = job.settings.sweep, identity(job)
    alone = database_file(options.storage) is not None
    _, higher = objective(job.settings)
    common = {
        "storage": storage,
        "study_name": options.study,
        "pruner": _pruner(options),
    }
    try:
        study = optuna.create_study(
            direction="maximize" if higher else "minimize",
            sampler=_sampler(options, job.settings.runtime.seed),
            **common,
        )
    except optuna.exceptions.DuplicatedStudyError:
        # Without a seed: the draws of the first command would come again.
        study = optuna.load_study(sampler=_sampler(options, None), **common)
        known = _noted_identity(study, 0 if alone else CREATOR_TAKES_S)
        _check(known or wanted, wanted, options)
    if alone:
        fail_running(study)
    queue_again(study, options)
    study.set_user_attr(IDENTITY, dict(wanted))  # last: others wait for it
    return study


def identity(job: TrainJob) -> dict[str, str]:
    """What all machines must have the same of, as text: what is tried, on what, by
    which code and versions."""
    options = job.settings.sweep
    swept = {*options.grid, *options.ranges}
    tried = {
        f"sweep.{name}": getattr(options, name)
        for name in ("sampler", "pruner", "grid", "ranges")
    }
    fixed = {n: v for n, v in result_identity(job).items() if n not in swept}
    facts = {**fixed, **tried, **trained_by(*_models(job.settings))}
    facts["sweep.choose_by"], _ = objective(job.settings)
    return {name: _text(value) for name, value in facts.items()}


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return json.dumps({k: _plain(v) for k, v in value.items()}, sort_keys=True)
    return value if isinstance(value, str) else json.dumps(_plain(value))


def _plain(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else value


def trained_by(*models: ModelSettings) -> dict[str, str]:
    """Versions, and digests of the code that trains `models`: of flatout's, and of a
    task and a family of one's own. Others' answers and checkpoints are not taken."""
    engine = Path(flatout.__file__).parent / "engine"
    modules = sorted({name for model in models for name in _own_modules(model)})
    own = {f"code of {name}": digest_of(sources_of(name)) for name in modules}
    return {**versions(), "code": digest_of(engine.rglob("*.py")), **own}


def _models(settings: Settings) -> Iterator[ModelSettings]:
    """All that the sweep may train, as far as they name code."""
    grid = settings.sweep.grid
    for name in ("task", "family"):
        for value in grid.get(f"model.{name}", [getattr(settings.model, name)]):
            yield settings.model.model_copy(update={name: value})


def _own_modules(model: ModelSettings) -> Iterator[str]:
    if "." in model.task:
        yield model.task.rpartition(".")[0]
    if model.family:
        yield model.family


def _check(
    known: Mapping[str, str], wanted: Mapping[str, str], options: SweepSettings
) -> None:
    if lines := list(_differences(known, wanted)):
        raise StorageError(
            f"sweep.study {options.study!r} in {without_password(options.storage)} was "
            "begun with something else:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nUse the same everywhere, or begin another one: name it with "
            "sweep.study. What the same code trained before is not lost"
        )


def _noted_identity(study: Study, quiet_s: int) -> Mapping[str, str] | None:
    """None if who created the study has noted none, and queued nothing for `quiet_s`:
    that process was killed."""
    count, quiet = -1, 0
    while True:
        known: Mapping[str, str] | None = study.user_attrs.get(IDENTITY)
        if known is not None or quiet >= quiet_s:
            return known
        time.sleep(1)
        now = len(study.get_trials(deepcopy=False))
        count, quiet = now, quiet + 1 if now == count else 0


def _differences(known: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*known, *wanted}):
        there, here = known.get(name, "none"), wanted.get(name, "none")
        if there != here:
            yield f"{name}: {there} there, {here} here"


def _sampler(options: SweepSettings, seed: int | None) -> Any:
    """A grid is queued by name: nothing is left to be drawn."""
    if options.sampler == "grid":
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed)


def _pruner(options: SweepSettings) -> Any:
    kinds = {
        "none": optuna.pruners.NopPruner,
        "hyperband": optuna.pruners.HyperbandPruner,
        "median": optuna.pruners.MedianPruner,
    }
    return kinds[options.pruner]()
