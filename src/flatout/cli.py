"""Kedro's commands for this project: `run` with plain errors, and `flatout ...`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from kedro.framework.cli.project import run as kedro_run
from kedro.framework.cli.utils import env_option
from kedro.framework.session import KedroSession

from flatout.engine.settings import SettingsError, parse_settings


class Fault(click.ClickException):
    """An error of the user's input, shown as its text alone."""

    exit_code = 2


@click.group(name="flatout")
def cli() -> None:
    """Commands of the project."""


@cli.command(
    name="run",
    params=kedro_run.params,
    help=kedro_run.help,
    context_settings=kedro_run.context_settings,
)
def run(**options: Any) -> Any:
    try:
        return kedro_run.callback(**options)
    except SettingsError as error:
        raise Fault(str(error)) from error


@cli.group()
def flatout() -> None:
    """What only flatout has: sync."""


@flatout.command()
@env_option
@click.option("--data-dir", help="Folder of the run's data. Default: data.")
@click.option("--tracking-uri", help="Another store than the runs were meant for.")
def sync(env: str | None, data_dir: str | None, tracking_uri: str | None) -> None:
    """Send to MLflow what it lacks of this folder's runs."""
    from flatout import tracking

    extra = {"data_dir": data_dir} if data_dir else {}
    with KedroSession.create(env=env, runtime_params=extra) as session:
        context = session.load_context()
        settings = parse_settings(context.config_loader["parameters"])
    points = Path(settings.paths.metrics)
    tracking.prepare(tracking_uri or "")
    lines = [
        line
        for file in (points, points.with_name("run.jsonl"))
        for line in tracking.sync(file, tracking_uri)
    ]
    for line in lines or ["MLflow has all of the runs in this folder."]:
        click.echo(line)
    if any(": not sent" in line for line in lines):
        raise SystemExit(1)
