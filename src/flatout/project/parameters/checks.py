"""Parameters and catalog entries that nothing would read are refused before a run."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kedro.framework.project import pipelines

from flatout.engine.parameters import Settings, SettingsError, refusal
from flatout.engine.parameters.faults import NEAR
from flatout.project.config_loader import ProjectConfigLoader
from flatout.project.fitting import raw_entry


def check_sources(loader: ProjectConfigLoader) -> None:
    """Raises SettingsError for parameters in globals.yml, for raw data under a name
    that the task does not read, and for misspelt entries."""
    if "corpus" in loader["globals"]:
        raise SettingsError(
            "corpus in globals.yml changes nothing since version 0.2: move it to "
            "conf/local/parameters.yml"
        )
    own, raw = _entries(loader, loader.default_run_env), raw_entry(loader.settings)
    if raw == "raw_sessions" and "raw_texts" in own and raw not in own:
        raise SettingsError(
            "model.task: next-key reads the catalog entry raw_sessions: rename "
            f"raw_texts in conf/{loader.default_run_env}"
        )
    refuse_misspelt_entries(loader)


def refuse_misspelt_entries(loader: ProjectConfigLoader) -> None:
    """Kedro accepts an entry of any name, and would read the one of conf/base."""
    base = _entries(loader, loader.base_env)
    own = {name.partition("@")[0] for name in loader["catalog"].keys() - base} - base
    given = _entries(loader, loader.default_run_env)
    for name in sorted(own):
        if name.startswith("_") or "{" in name:
            continue
        near = difflib.get_close_matches(name, base - given, n=1, cutoff=NEAR)
        if near and not any(name in p.datasets() for p in pipelines.values()):
            raise SettingsError(
                f"catalog entry {name}: no pipeline uses it; did you mean {near[0]}? "
                "Rename it, or remove it; a name that begins with _ is left alone"
            )


def _entries(loader: ProjectConfigLoader, environment: str) -> set[str]:
    """Names of the catalog entries of one environment."""
    folder = Path(loader.conf_source, environment)
    if not folder.is_dir():  # an archive of conf/
        return set()
    patterns = loader.config_patterns["catalog"]
    found = loader.load_and_merge_dir_config(str(folder), patterns, "catalog", set())
    return set(found)


def check_groups(given: Mapping[str, Any], inputs: Collection[str]) -> None:
    """Raises SettingsError for groups of `given`, which came with --params, that
    neither flatout nor a node of the run, with these inputs, reads."""
    read = {name.removeprefix("params:").partition(".")[0] for name in inputs}
    valid = sorted(Settings.model_fields)
    unread = sorted(set(given) - set(valid) - read)
    if unread and "parameters" not in inputs:
        why = f"unknown parameter, no node of this run reads it; valid: {valid}"
        raise refusal([f"{name}: {why}" for name in unread])
