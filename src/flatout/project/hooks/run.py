"""State of the current command, which the four hook classes share."""

from __future__ import annotations

import shlex
from pathlib import Path

from kedro.framework.context import KedroContext
from kedro.framework.project import settings as of_kedro

from flatout.engine.machine.environment import current_ranks
from flatout.engine.parameters import Settings
from flatout.engine.rows import row_kind
from flatout.places import use_project
from flatout.project.config_loader import ProjectConfigLoader, loader_of
from flatout.project.mlflow_options import MlflowOptions, mlflow_options
from flatout.project.parameters.table import as_params
from flatout.tracking import RunFolder

REPEATED = ("data_dir", "arrays", "corpus", "images", "model", "split", "tokenize")
"""Parameters that determine the data and the model."""


class Run:
    """State of one command. `begin` sets the fields when Kedro has created the
    context."""

    context: KedroContext
    loader: ProjectConfigLoader
    settings: Settings
    options: MlflowOptions
    data: Path
    """The folder in which the run writes all its files."""
    tracked: RunFolder | None = None
    """The run's record for MLflow, or None if the run is not tracked."""
    reused: bool = False
    """True if training had already finished, so that this run did not train."""

    def begin(self, context: KedroContext) -> None:
        """Set the fields from `context`. Raises SettingsError if a parameter or an
        option in mlflow.yml is invalid."""
        use_project(context.project_path)
        self.context, self.loader = context, loader_of(context)
        self.settings = self.loader.settings
        self.options = mlflow_options(context)
        self.data = Path(context.project_path, self.settings.data_dir or "data")
        self.tracked, self.reused = None, False

    @property
    def kind(self) -> str:
        """The name of the kind of rows in catalog entries, such as `train_<kind>`."""
        return row_kind(self.settings.train.rows).kind

    @property
    def is_main(self) -> bool:
        """Return whether this is the main process of the first machine."""
        is_first = self.settings.train.distributed.machine_rank == 0
        return is_first and current_ranks().is_main

    @property
    def run_options(self) -> str:
        """The options of this run that suggested `kedro run` commands must repeat:
        --env, --conf-source and the parameters in REPEATED."""
        loader, conf = self.loader, self.context.project_path / of_kedro.CONF_SOURCE
        source, given = loader.conf_source, loader.runtime_params or {}
        repeated = {name: given[name] for name in given if name in REPEATED}
        return _joined(
            env=loader.env,
            conf_source=None if Path(source) == conf else source,
            params=as_params(repeated),
        )

    @property
    def data_option(self) -> str:
        """The option --data-dir with which `kedro flatout` commands find the data of
        this run, or "" for the default folder."""
        data_dir = self.settings.data_dir
        return _joined(data_dir=None if data_dir == "data" else data_dir)

    @property
    def checkpoints(self) -> Path:
        return Path(self.settings.paths.checkpoints)


def _joined(**options: str | None) -> str:
    """Return one string of the options that have a value, each preceded by a space."""
    given = ((f"--{n.replace('_', '-')}", v) for n, v in options.items() if v)
    return "".join(f" {shlex.quote(f'{name}={value}')}" for name, value in given)
