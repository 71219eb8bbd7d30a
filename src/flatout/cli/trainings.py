"""Commands for finished trainings."""

from __future__ import annotations

import logging
from pathlib import Path

import click
from kedro.framework.cli.utils import env_option

from flatout.cli.groups import DATA_DIR, context_at, flatout, plain_errors
from flatout.engine.machine.environment import set_defaults
from flatout.project.config_loader import loader_of
from flatout.project.mlflow_options import login, mlflow_options


@flatout.command()
@env_option
@DATA_DIR
@click.option("--tracking-uri", help="Another store than the runs were meant for.")
def sync(env: str | None, data_dir: str | None, tracking_uri: str | None) -> None:
    """Send the data that MLflow lacks of this folder's runs.

    They are the last training, the last other run, and the unsent data of runs before
    them.
    """
    from flatout.tracking.follow import sync as send

    with plain_errors():
        context = context_at(env, data_dir)
        settings = loader_of(context).settings
        set_defaults(login(context, mlflow_options(context)))
    logging.getLogger("flatout").setLevel(logging.INFO)
    lines = send(Path(settings.paths.metrics).with_name("tracking"), tracking_uri)
    for line in lines or ["MLflow has all of the runs in this folder."]:
        click.echo(line)
    if any(": not sent" in line for line in lines):
        raise SystemExit(1)


@flatout.command()
@click.argument("logfile", type=click.Path(path_type=Path))
@click.option("--hours", type=float, required=True, help="That are allowed in all.")
@click.option(
    "--steps", type=click.IntRange(min=1), help="Of the whole, where the log is silent."
)
def deadline(logfile: Path, hours: float, steps: int | None) -> None:
    """Predict from the LOGFILE of any training whether it will end in time.

    Steps and times are read from plain lines, bars of tqdm and JSON lines.
    """
    from flatout.reports.deadline import deadline_lines

    if hours <= 0:
        raise click.BadParameter("hours must be above 0", param_hint="--hours")
    with plain_errors():
        lines = deadline_lines(logfile, hours, steps)
    for line in lines:
        click.echo(line)
