"""Commands that do not train: `doctor`, `parameters`, `ui`, `sync`, `deadline`."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import click
from kedro.framework.cli.utils import env_option
from rich.console import Console

from flatout.cli.groups import (
    DATA_DIR,
    PARAMS,
    cli,
    context_at,
    context_of,
    flatout,
    plain_errors,
)
from flatout.engine.machine.environment import set_defaults
from flatout.project.config_loader import loader_of
from flatout.project.mlflow_options import login, mlflow_options


@cli.command()
@env_option
@PARAMS
@click.option("--json", "wants_json", is_flag=True, help="Print JSON in the last line.")
def doctor(env: str | None, params: dict[str, Any], wants_json: bool) -> None:
    """Check machine, installation, settings and data.

    The exit code is 1 if a check fails. Accepts the options of the planned run, and
    changes no files.
    """
    from flatout.doctor import as_json, as_table, examination

    if wants_json:
        logging.disable(logging.WARNING)
    findings = examination(env, params)
    if wants_json:
        click.echo(as_json(findings))
    else:
        Console().print(as_table(findings))
    raise SystemExit(any(found.status == "fail" for found in findings))


flatout.add_command(doctor)


@flatout.command()
@click.argument("group", required=False)
@env_option
@PARAMS
def parameters(group: str | None, env: str | None, params: dict[str, Any]) -> None:
    """Print all parameters of a run, or of one GROUP, with their sources."""
    from flatout.project.parameters import table as tables

    with plain_errors():
        tables.check_group(group)
        loader = loader_of(context_of(env, params))
    click.echo(tables.table(loader, group))


@flatout.command()
@env_option
@DATA_DIR
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default="5000", show_default=True)
def ui(env: str | None, data_dir: str | None, host: str, port: str) -> None:
    """Show the runs in the MLflow UI."""
    from flatout.tracking.server import serve

    with plain_errors():
        options = mlflow_options(context_at(env, data_dir))
    raise SystemExit(serve(options.store, click.echo, host=host, port=port))


@flatout.command()
@env_option
@DATA_DIR
@click.option("--tracking-uri", help="Send unsent runs to this store instead.")
def sync(env: str | None, data_dir: str | None, tracking_uri: str | None) -> None:
    """Send the unsent data of the runs in the data folder to MLflow.

    The folder keeps the last training run, the last other run, and the unsent data of
    earlier runs.
    """
    from flatout.tracking.follow import sync as send

    with plain_errors():
        context = context_at(env, data_dir)
        settings = loader_of(context).settings
        set_defaults(login(context, mlflow_options(context)))
    logging.getLogger("flatout").setLevel(logging.INFO)
    lines = send(Path(settings.paths.metrics).with_name("tracking"), tracking_uri)
    for line in lines or ["MLflow already has all runs in this folder."]:
        click.echo(line)
    if any(": not sent" in line for line in lines):
        raise SystemExit(1)


@flatout.command()
@click.argument("logfile", type=click.Path(path_type=Path))
@click.option("--hours", type=float, required=True, help="Time limit of the training.")
@click.option(
    "--steps", type=click.IntRange(min=1), help="Total number, if not in the log."
)
def deadline(logfile: Path, hours: float, steps: int | None) -> None:
    """Predict whether a training run will finish in time, from its log file.

    Steps and times are read from plain log lines and tqdm progress bars. The exit code
    is 1 if the run is too slow.
    """
    from flatout.reports.deadline import deadline_lines

    if not 0 < hours < math.inf:
        wrong = "hours must be a number above 0"
        raise click.BadParameter(wrong, param_hint="--hours")
    with plain_errors():
        lines = deadline_lines(logfile, hours, steps)
    click.echo("\n".join(lines))
    raise SystemExit(not lines[0].startswith("In time"))
