"""Values that are given where nothing reads them, or that only the catalog reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from flatout.engine.parameters import Settings, SettingsError, parse_settings, refusal
from flatout.project.config_loader import ProjectConfigLoader
from flatout.project.parameters.entries import refuse_misspelt_names


def check_sources(loader: ProjectConfigLoader) -> None:
    """Raises SettingsError for globals that cannot be used, for parameters that work
    only as globals or on the command line, and for misspelt catalog entries."""
    _check_globals(loader["globals"])
    refuse_unread(loader.given_parameters, loader.runtime_params or {})
    refuse_misspelt_names(loader)


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
