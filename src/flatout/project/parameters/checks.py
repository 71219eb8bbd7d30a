"""Values and catalog entries that are given where nothing reads them, and values that
only the catalog reads."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from flatout.engine.parameters import Settings, SettingsError, parse_settings, refusal
from flatout.engine.parameters.faults import NEAR
from flatout.project.config_loader import SETTINGS_OF_TRAINING, ProjectConfigLoader


def check_sources(loader: ProjectConfigLoader) -> None:
    """Raises SettingsError for globals that cannot be used, for parameters that work
    only as globals or on the command line, and for misspelt catalog entries."""
    _check_globals(loader["globals"])
    refuse_unread(loader.given_parameters, loader.runtime_params or {})
    _refuse_misspelt_entries(loader)


def _refuse_misspelt_entries(loader: ProjectConfigLoader) -> None:
    """Kedro takes an entry of any name, and would run on the one of conf/base."""
    env, local = loader.env or loader.default_run_env, loader.default_run_env
    for layer in {env, local} if env in SETTINGS_OF_TRAINING else {env}:
        given = _entries(loader, layer)
        if not given or layer == loader.base_env:
            continue
        used = _entries(loader, loader.base_env)
        for name in sorted(given - used):
            near = difflib.get_close_matches(name, used - given, n=1, cutoff=NEAR)
            if near and not _is_in_a_pipeline(name):
                raise SettingsError(
                    f"catalog entry {name} in conf/{layer}: no pipeline uses it; did "
                    f"you mean {near[0]}? Rename it, or take it out; a name that "
                    f"begins with _ is left alone"
                )


def _entries(loader: ProjectConfigLoader, layer: str) -> set[str]:
    """Names of data sets; none of patterns and of what is there for YAML alone."""
    folder = Path(loader.conf_source) / layer
    if not folder.is_dir():
        return set()
    found = loader.load_and_merge_dir_config(
        str(folder), loader.config_patterns["catalog"], "catalog", set()
    )
    return {
        name.partition("@")[0]
        for name in found
        if not name.startswith("_") and "{" not in name
    }


def _is_in_a_pipeline(name: str) -> bool:
    """Looked for in their text: importing all of them would import torch."""
    texts = (
        (folder / "pipeline.py").read_text(encoding="utf-8")
        for folder in resources.files("flatout.pipelines").iterdir()
        if (folder / "pipeline.py").is_file()
    )
    return any(f'"{name}"' in text or f"'{name}'" in text for text in texts)


def _check_globals(found: Mapping[str, Any]) -> None:
    """The catalog takes them as they are: a fault would show after hours, or never."""
    corpus = found.get("corpus", {})
    parse_settings({"corpus": corpus})
    missing = [f"corpus.{name}" for name in ("rows", "labels") if name not in corpus]
    if missing or corpus["labels"] is None:
        raise SettingsError(
            f"{' and '.join(missing) or 'corpus.labels'} must be set in "
            "conf/base/globals.yml (corpus.rows may be null: all there are)"
        )


def refuse_unread(parameters: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """`given` came with --params; all other `parameters` come from files, where the
    catalog does not see them."""
    corpus, asked = parameters.get("corpus") or {}, given.get("corpus") or {}
    faults = [
        f"corpus.{name} in a parameters file changes nothing: set it in "
        f"conf/local/globals.yml, or with --params=corpus.{name}={corpus[name]}"
        for name in sorted(set(corpus) - set(asked))
    ]
    for kind in ("arrays", "images"):
        path = (parameters.get(kind) or {}).get("path")
        if path and "path" not in (given.get(kind) or {}):
            faults.append(
                f"{kind}.path in a parameters file changes nothing: name {path} in the "
                f"entry raw_{kind} of the catalog, or with --params={kind}.path={path}"
            )
    if "data_dir" in parameters and "data_dir" not in given:
        faults.append(
            "data_dir in a parameters file changes nothing: give it with "
            f"--params=data_dir={parameters['data_dir']}"
        )
    if faults:
        raise SettingsError("; ".join(faults))


def check_groups(given: Mapping[str, Any], inputs: Collection[str]) -> None:
    """Raises SettingsError for groups of `given`, which came with --params, that
    neither flatout nor a node of the run, with these inputs, reads."""
    read = {name.removeprefix("params:").partition(".")[0] for name in inputs}
    valid = sorted(Settings.model_fields)
    unread = sorted(set(given) - set(valid) - read)
    if unread and "parameters" not in inputs:
        why = f"unknown parameter, no node of this run reads it; valid: {valid}"
        raise refusal([f"{name}: {why}" for name in unread])
