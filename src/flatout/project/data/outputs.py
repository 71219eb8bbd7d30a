"""Check before a run starts that all of its results can be written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from kedro.framework.context import KedroContext
from kedro.io import CatalogConfigResolver
from kedro.pipeline import Pipeline

from flatout.engine.data.given_splits import entry_of
from flatout.engine.data.raw_texts import SPLITS
from flatout.engine.files.writable import ELSEWHERE, first_fault
from flatout.engine.parameters import Settings, SettingsError
from flatout.project.fitting import short_names

WORK: dict[str, Callable[[Settings], tuple[str, ...]]] = {
    "train_model": lambda found: (found.paths.checkpoints, found.paths.metrics),
    "run_trials": lambda found: (found.benchmark.folder,),
    "run_sweep": lambda found: (found.sweep.folder,),
    "cross_validate": lambda found: (found.sweep.folder,),
}
"""Maps nodes to the files and folders that they write in addition to their outputs."""
KINDS = ("texts", "arrays", "images")
INPUTS = frozenset(
    {
        *(f"{use}_{kind}" for use in ("raw", "predict") for kind in KINDS),
        *map(entry_of, SPLITS),
        *("tuned_parameters", "best_parameters"),
    }
)
"""Entries that are inputs or are stored in conf/. They are checked only if the run
writes them."""

PLACES = ("filepath", "path")
KEYS = ("type", *PLACES)
IN_MEMORY = {"{default}": {"type": "kedro.io.MemoryDataset"}}


class UnwritableError(ValueError):
    """Raised if results of the run could not be saved."""


def check_outputs(
    settings: Settings, pipeline: Pipeline, context: KedroContext, stores: list[Path]
) -> None:
    """Raise UnwritableError if an output cannot be written, and SettingsError if the
    run would overwrite the model it starts from. `stores` are MLflow's local files."""
    names = short_names(pipeline)
    paths = [Path(p) for name in names & WORK.keys() for p in WORK[name](settings)]
    paths += [*local_paths(context, pipeline.all_outputs()), *stores]
    if fault := first_fault(paths):
        raise UnwritableError(f"{fault}: {ELSEWHERE}")
    check_source(settings.model.name_or_path, paths)


def check_source(name: str | None, written: Collection[Path]) -> None:
    """Raise SettingsError if a run would overwrite the model that it starts from."""
    source = Path(name or "").resolve()
    if name and {source, *source.parents} & {path.resolve() for path in written}:
        raise SettingsError(
            f"model.name_or_path is {source}, which this run would overwrite: copy "
            f"it (cp -r {name} {source.parent}/before) and name the copy, or keep the "
            "new one elsewhere (--params=data_dir=...)"
        )


def local_paths(context: KedroContext, names: Iterable[str] = ()) -> list[Path]:
    """Return the local paths of the named catalog entries, or of all except INPUTS if
    no names are given. The paths are read from the configuration, because creating
    entries would import packages."""
    entries = {
        name: {key: entry[key] for key in KEYS if key in entry}
        for name, entry in context.config_loader["catalog"].items()
        if isinstance(entry, dict)
    }
    known = CatalogConfigResolver(entries, default_runtime_patterns=IN_MEMORY)
    chosen = names or entries.keys() - INPUTS
    found = [known.resolve_pattern(name) for name in sorted(chosen)]
    paths = [str(e[key]) for e in found for key in PLACES if e.get(key)]
    return [context.project_path / path for path in paths if "://" not in path]
