"""Values that are given where nothing reads them, or that only the catalog reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kedro.config import AbstractConfigLoader

from flatout.engine.settings import SettingsError, parse_settings


def check_sources(loader: AbstractConfigLoader) -> None:
    """Raises SettingsError for globals that cannot be used, and for parameters that
    work only as globals or on the command line."""
    _check_globals(loader["globals"])
    refuse_unread(loader["parameters"], loader.runtime_params or {})


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
    if "data_dir" in parameters and "data_dir" not in given:
        faults.append(
            "data_dir in a parameters file changes nothing: give it with "
            f"--params=data_dir={parameters['data_dir']}"
        )
    if faults:
        raise SettingsError("; ".join(faults))
