"""The command of a run as another run can type it, for `benchmark.mode=journey`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import DataCatalog, MemoryDataset
from kedro.pipeline import Pipeline
from kedro.utils import find_kedro_project

from flatout.engine.parameters import SettingsError
from flatout.places import project_path
from flatout.project.parameters.hooks import checked_settings, loader_of

ENTRY, THIS_RUN = "whole_run", "this_run"
DEFAULT = ("split", "tokenize", "train", "evaluate")
"""Pipelines of `kedro run`, where no parameter names others."""
OF_BENCHMARK = frozenset({"benchmark", "sweep", "data_dir"})
"""Parameters of this command that are not the other's."""


@dataclass(frozen=True)
class KedroRun:
    """`kedro run` in the same environment, with the same parameters and some more."""

    env: str | None
    conf_source: str
    params: Mapping[str, Any]

    def argv(self, file: Path, changes: Mapping[str, Any]) -> list[str]:
        """Parameters of any form go through `file`; --params takes no comma."""
        options = {
            "env": self.env,
            "conf_source": self.conf_source,
            "params": _merged(self.params, changes),
        }
        given = {name: value for name, value in options.items() if value is not None}
        packaged = find_kedro_project(Path.cwd()) is None
        module = ["-m", "flatout"] if packaged else ["-m", "kedro", "run"]
        # Kedro looks for the name by which click knows the command.
        section = "python -m flatout" if packaged else "run"
        file.write_text(yaml.safe_dump({section: given}), encoding="utf-8")
        return [sys.executable, *module, f"--config={file}"]


class WholeRunHooks:
    """Tells the benchmark what the user's whole command is, where it asks for it, and
    a sweep its own environment and parameters."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        self._settings = checked_settings(context)
        loader = loader_of(context)
        given = loader.runtime_params or {}
        kept = {k: v for k, v in given.items() if k not in OF_BENCHMARK}
        conf = str(Path(loader.conf_source).absolute())
        self._run = KedroRun(context.env, conf, kept)
        self._this_run = loader.this_run()

    @hook_impl
    def after_catalog_created(
        self, catalog: DataCatalog, conf_catalog: dict[str, Any]
    ) -> None:
        self._entries = conf_catalog
        catalog[ENTRY] = MemoryDataset(data=None, copy_mode="assign")
        catalog[THIS_RUN] = MemoryDataset(data=self._this_run)

    @hook_impl
    def before_pipeline_run(self, pipeline: Pipeline, catalog: DataCatalog) -> None:
        """Raises SettingsError where the other run would write beside its folder."""
        asked = self._settings.benchmark.mode == "journey"
        if not asked or ENTRY not in pipeline.inputs():
            return
        from flatout.engine.benchmark.journey.commands import WholeRun

        data = Path(project_path(self._settings.data_dir or "data")).resolve()
        project, places = Path(project_path()), self._places(data)
        whole = WholeRun(self._run.argv, project, data / "01_raw", places)
        catalog.get(ENTRY).save(whole)

    def _places(self, data: Path) -> dict[str, str]:
        """Of what `kedro run` leaves, inside of `data`."""
        rows, left = self._settings.train.rows, set()
        for name in self._settings.pipelines or DEFAULT:
            module = import_module(f"flatout.pipelines.{name}")
            left |= module.create_pipeline(rows=rows).all_outputs()
        paths = {
            name: Path(entry["filepath"]).resolve()
            for name, entry in self._entries.items()
            if name in left and isinstance(entry, dict) and "filepath" in entry
        }
        fixed = sorted(n for n, path in paths.items() if not path.is_relative_to(data))
        if fixed:
            raise SettingsError(
                "benchmark.mode: journey runs whole commands in a data folder of their "
                f"own, and would overwrite {', '.join(fixed)}: begin the path in the "
                "catalog with ${runtime_params:data_dir, data}/"
            )
        return {name: str(path.relative_to(data)) for name, path in paths.items()}


def _merged(given: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` over `given`, group by group."""
    merged = dict(given)
    for name, value in changes.items():
        under = merged.get(name)
        both = isinstance(value, Mapping) and isinstance(under, Mapping)
        merged[name] = _merged(under, value) if both else value  # type: ignore[arg-type]
    return merged
