"""The Optuna study that a sweep goes on with, and whether it is the same sweep."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import optuna
import xxhash
from optuna.study import Study

import flatout
from flatout.engine.benchmark.recommend import versions
from flatout.engine.parameters import ModelSettings, Settings, SweepSettings
from flatout.engine.parameters.secrets import without_password
from flatout.engine.sweep.queue import this_machine
from flatout.engine.sweep.space import objective
from flatout.engine.sweep.storage import Patience, StorageError, open_storage
from flatout.engine.train.setup.identity import result_identity
from flatout.engine.train.setup.job import TrainJob

IDENTITY = "identity"
CREATOR_TAKES_S = 30.0


def open_study(job: TrainJob, stop: threading.Event) -> Study:
    """Begun, or gone on with. Raises SettingsError, and StorageError where the study
    has another identity."""
    storage, wanted = open_storage(job.settings.sweep.storage), identity(job)
    patience = Patience(job.settings.sweep.storage, stop)
    return patience.ask(lambda: _opened(job.settings, storage, wanted))


def _opened(settings: Settings, storage: Any, wanted: Mapping[str, str]) -> Study:
    """Again from its begin where the storage was away in between."""
    options, seed = settings.sweep, settings.runtime.seed
    _, higher = objective(settings)
    try:
        study = optuna.create_study(
            storage=storage,
            study_name=options.study,
            direction="maximize" if higher else "minimize",
            pruner=_pruner(options),
        )
        study.set_user_attr(IDENTITY, dict(wanted))
    except optuna.exceptions.DuplicatedStudyError:
        study = optuna.load_study(
            storage=storage, study_name=options.study, pruner=_pruner(options)
        )
        _check(study, wanted, options)
        # Another seed, or the draws of another machine would come again.
        words = f"{seed} {len(study.get_trials(deepcopy=False))} {this_machine()}"
        seed = xxhash.xxh32_intdigest(words.encode())
    study.sampler = _sampler(options, seed)
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
    own = {f"code of {name}": _digest(_sources(name)) for name in modules}
    return {**versions(), "code": _digest(engine.rglob("*.py")), **own}


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


def _sources(module: str) -> Iterable[Path]:
    """A module's file, of one in a package also those beside it, which it may import.
    None of a module that cannot be found: importing it says so."""
    with suppress(ImportError, ValueError):
        spec = find_spec(module)
        if spec and spec.origin and (file := Path(spec.origin)).is_file():
            return file.parent.glob("*.py") if spec.parent else [file]
    return []


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _check(study: Study, wanted: Mapping[str, str], options: SweepSettings) -> None:
    known = _identity_of(study)
    if known is None:  # who made the study was killed in that moment
        study.set_user_attr(IDENTITY, dict(wanted))
        return
    if lines := list(_differences(known, wanted)):
        raise StorageError(
            f"sweep.study {options.study!r} in {without_password(options.storage)} was "
            "begun with something else:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nUse the same everywhere, or begin another one: name it with "
            "sweep.study. What the same code trained before is not lost"
        )


def _identity_of(study: Study) -> Mapping[str, str] | None:
    """Whoever makes the study notes it right after."""
    for _ in range(int(CREATOR_TAKES_S)):
        known: Mapping[str, str] | None = study.user_attrs.get(IDENTITY)
        if known is not None:
            return known
        time.sleep(1)
    return None


def _differences(known: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*known, *wanted}):
        there, here = known.get(name, "none"), wanted.get(name, "none")
        if there != here:
            yield f"{name}: {there} there, {here} here"


def _sampler(options: SweepSettings, seed: int) -> Any:
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
