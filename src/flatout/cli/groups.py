"""Command groups, and functions that all commands share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from kedro.framework.cli.project import run as kedro_run
from kedro.framework.context import KedroContext
from kedro.framework.session import KedroSession
from kedro.io import DatasetError

from flatout.project.command_line import check_data_dir, check_environment, plain_error

logger = logging.getLogger(__name__)

OF_RUN = {option.name: option for option in kedro_run.params}
PARAMS = click.option(
    "--params",
    default="",
    callback=OF_RUN["params"].callback,
    help="Parameters of kedro run.",
)
DATA_DIR = click.option("--data-dir", help="Data folder of the run. Default: data.")


class Fault(click.ClickException):
    """A known error. Its message, shown without a traceback, explains what to do."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        usual = 3 if isinstance(error, DatasetError) else 2
        self.exit_code = getattr(error, "exit_code", usual)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Context manager that re-raises known errors as Fault, for which click shows only
    the message."""
    try:
        yield
    except Exception as error:
        plain = plain_error(error)
        if plain is None:
            raise
        logger.debug("traceback of the error below", exc_info=True)
        raise Fault(plain) from error


def context_of(env: str | None, params: dict[str, Any]) -> KedroContext:
    """Return the context for a command that runs no pipeline. Raises CommandError if
    the environment is unknown."""
    check_environment(env)
    with KedroSession.create(env=env, runtime_params=params) as session:
        return session.load_context()


def context_at(env: str | None, data_dir: str | None) -> KedroContext:
    """Return the context for a command that reads `data_dir`. Raises CommandError if
    the folder or the environment does not exist."""
    check_data_dir(data_dir)
    return context_of(env, {"data_dir": data_dir} if data_dir else {})


REMOVED = {
    "benchmark --force": "kedro flatout init FILE --force writes the settings first",
    "benchmark --label-column": "kedro flatout init FILE has this option",
    "benchmark --text-column": "kedro flatout init FILE has this option",
    "best": "kedro run --pipelines=sweep writes conf/best",
    "compare": "kedro run --pipelines=benchmark --params=benchmark.mode=ladder "
    "measures each optimisation",
    "compile-cache": "archive the cache with tar as docs/guides/gpus.md describes",
    "init --yes": "init asks nothing any more; --task names the task",
    "mlflow": "kedro flatout ui shows the runs; conf/base/mlflow.yml has settings",
    "parameters --markdown": "docs/parameters.md lists all parameters",
}
"""Maps removed commands and options to a message that names their replacement."""


class FlatoutGroup(click.Group):
    """Command group that shows replacements for removed commands and options."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        _check_removed(ctx, cmd_name)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        for option in args[1:]:
            _check_removed(ctx, f"{args[0]} {option.partition('=')[0]}")
        return super().resolve_command(ctx, args)


def _check_removed(ctx: click.Context, name: str) -> None:
    if name in REMOVED:
        ctx.fail(f"{name} was removed in this version. {REMOVED[name]}")


@click.group(name="flatout", cls=FlatoutGroup)
def cli() -> None:
    """Commands of this project."""


@cli.group(cls=FlatoutGroup)
def flatout() -> None:
    """Additional commands of flatout."""
