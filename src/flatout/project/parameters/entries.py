"""Catalog entries of the user's own: names that no pipeline uses, and options that
their types do not have."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from kedro.io.core import DatasetError, parse_dataset_definition

from flatout.engine.parameters import SettingsError
from flatout.engine.parameters.faults import NEAR, near_or_all
from flatout.project.config_loader import SETTINGS_OF_TRAINING, ProjectConfigLoader

ARGUMENTS = ("load_args", "save_args")


def refuse_misspelt_names(loader: ProjectConfigLoader) -> None:
    """Kedro takes an entry of any name, and would run on the one of conf/base."""
    for layer, entries in _own_layers(loader):
        given, used = _names(entries), _names(_entries(loader, loader.base_env))
        for name in sorted(given - used):
            near = difflib.get_close_matches(name, used - given, n=1, cutoff=NEAR)
            if near and not _is_in_a_pipeline(name):
                raise SettingsError(
                    f"catalog entry {name} in conf/{layer}: no pipeline uses it; did "
                    f"you mean {near[0]}? Rename it, or take it out; a name that "
                    f"begins with _ is left alone"
                )


def refuse_misspelt_options(
    loader: ProjectConfigLoader, names: Collection[str]
) -> None:
    """Of the entries `names` alone, which the run builds: their types are imported."""
    faults = [
        f"catalog entry {name} in conf/{layer}: {fault}"
        for layer, entries in _own_layers(loader)
        for name in sorted(entries.keys() & set(names))
        for fault in _option_faults(entries[name])
    ]
    if faults:
        raise SettingsError("\n".join(faults))


def _option_faults(entry: Any) -> Iterator[str]:
    """`flatout.datasets.TextFiles has no delimeter; did you mean delimiter?`"""
    try:
        kind, options = parse_dataset_definition(entry)
    except (DatasetError, KeyError, TypeError, AttributeError):
        return  # Kedro says what is wrong with the type
    functions = {name: _function(kind, name) for name in ARGUMENTS}
    for name in _unknown(kind, options):
        meant = [a for a, f in functions.items() if f and not _unknown(f, [name])]
        hint = f"put it under {meant[0]}" if meant else _hint(kind, name)
        yield f"{entry['type']} has no {name}; {hint}"
    for group, function in functions.items():
        given = options.get(group)
        if function is not None and isinstance(given, dict):
            for name in _unknown(function, given):
                hint = _hint(function, name)
                yield f"{group}: pandas' {function.__name__} has no {name}; {hint}"


def _function(kind: type, group: str) -> Callable[..., Any] | None:
    """What the arguments of an entry of `pandas` are for: `pandas.read_csv`."""
    if not kind.__module__.startswith("kedro_datasets.pandas."):
        return None
    form, pandas = kind.__name__.removesuffix("Dataset").lower(), sys.modules["pandas"]
    found = {
        "load_args": getattr(pandas, f"read_{form}", None),
        "save_args": getattr(pandas.DataFrame, f"to_{form}", None),
    }
    return found[group]


def _unknown(function: Callable[..., Any], given: Collection[str]) -> list[str]:
    """Those that it does not take; none where it takes any."""
    taken = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    return [] if takes_any else sorted(set(given) - taken.keys())


def _hint(function: Callable[..., Any], name: str) -> str:
    return near_or_all(name, [*inspect.signature(function).parameters])


def _own_layers(loader: ProjectConfigLoader) -> Iterator[tuple[str, dict[str, Any]]]:
    """Entries of the environment in use, and of the one that lies below it."""
    env = loader.env or loader.default_run_env
    layers = {env, loader.lower_env} if env in SETTINGS_OF_TRAINING else {env}
    for layer in sorted(layers - {loader.base_env}):
        if entries := _entries(loader, layer):
            yield layer, entries


def _entries(loader: ProjectConfigLoader, layer: str) -> dict[str, Any]:
    """Data sets by name; none of patterns and of what is there for YAML alone."""
    folder = Path(loader.conf_source) / layer
    if not folder.is_dir():
        return {}
    found = loader.load_and_merge_dir_config(
        str(folder), loader.config_patterns["catalog"], "catalog", set()
    )
    return {
        name: entry
        for name, entry in found.items()
        if not name.startswith("_") and "{" not in name
    }


def _names(entries: Collection[str]) -> set[str]:
    return {name.partition("@")[0] for name in entries}


def _is_in_a_pipeline(name: str) -> bool:
    """Looked for in their text: importing all of them would import torch."""
    texts = (
        (folder / "pipeline.py").read_text(encoding="utf-8")
        for folder in resources.files("flatout.pipelines").iterdir()
        if (folder / "pipeline.py").is_file()
    )
    return any(f'"{name}"' in text or f"'{name}'" in text for text in texts)
