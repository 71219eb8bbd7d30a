"""Kedro's commands for this project: `run` with plain errors, and `flatout ...`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from kedro.framework.cli.hooks.manager import get_cli_hook_manager
from kedro.framework.cli.project import run as kedro_run
from kedro.framework.cli.utils import _split_params, env_option
from kedro.framework.session import KedroSession
from kedro.io import DatasetError
from rich.console import Console

from flatout.project.command_line import (
    PassSignalsOn,
    check_command,
    check_data_dir,
    check_environment,
    plain_error,
)
from flatout.project.grid_command import (
    ListsCommand,
    grid_parameters,
    of_samples,
    use_device,
)
from flatout.project.parameters.hooks import checked_settings, loader_of
from flatout.project.terminal import show_kedro

logger = logging.getLogger(__name__)

get_cli_hook_manager().register(PassSignalsOn())

VERBOSE = click.Option(["-v", "--verbose"], is_flag=True, help="Kedro's lines too.")
RUN_HELP = """Run pipelines; without names split, tokenize, train and evaluate.

\b
Pipelines: split, tokenize, arrays, images, train, evaluate, predict, benchmark, sweep.

\b
Examples:
  kedro run --params=train.epochs=3,train.learning_rate=5e-5
  kedro run --pipelines=train --env=bert_base
  kedro run --pipelines=benchmark
"""
AT_LEAST_1 = click.IntRange(min=1)


class Fault(click.ClickException):
    """An error that flatout knows: its text says what to do, a traceback would not."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        usual = 3 if isinstance(error, DatasetError) else 2
        self.exit_code = getattr(error, "exit_code", usual)


@contextmanager
def plain_errors(**options: Any) -> Iterator[None]:
    """A sentence in place of a traceback, where one says all."""
    try:
        yield
    except Exception as error:
        plain = plain_error(error, options)
        if plain is None:
            raise
        logger.debug("traceback of the error below", exc_info=True)
        raise Fault(plain) from error


@click.group(name="flatout")
def cli() -> None:
    """Commands of the project."""


@cli.command(
    name="run",
    params=[*kedro_run.params, VERBOSE],
    help=RUN_HELP,
    context_settings=kedro_run.context_settings,
)
def run(verbose: bool, **options: Any) -> Any:
    if verbose:
        show_kedro()
    if options["pipeline"] and not options["pipelines"]:
        # One name is one of several: Kedro takes both options, and warns of this one.
        options |= {"pipelines": [options["pipeline"]], "pipeline": None}
    with plain_errors(**options):
        check_command(options)
        return kedro_run.callback(**options)


@cli.command()
@env_option
@click.option("--params", default="", callback=_split_params, help="As kedro run's.")
@click.option("--json", "wants_json", is_flag=True, help="One line, the last one.")
def doctor(env: str | None, params: dict[str, Any], wants_json: bool) -> None:
    """Check machine, installation, settings and data; exit code 1 with a fail.

    Takes the options of the run that is meant. Changes nothing.
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


@cli.group()
def flatout() -> None:
    """What only flatout has."""


flatout.add_command(doctor)


@flatout.command()
@click.option("--env", default="local", show_default=True, help="The fast side.")
@click.option("--slow-env", default="slow", show_default=True)
@click.option(
    "--global-batch-size",
    type=AT_LEAST_1,
    default=16,
    show_default=True,
    help="Of both.",
)
@click.option(
    "--steps",
    type=AT_LEAST_1,
    default=40,
    show_default=True,
    help="Optimizer steps of each.",
)
@click.option(
    "--repeats",
    type=AT_LEAST_1,
    default=3,
    show_default=True,
    help="Trainings of each.",
)
@click.option("--data-dir", help="Folder of the run's data. Default: data.")
def compare(data_dir: str | None, **options: Any) -> None:
    """Train in two environments on the same tokens; print samples/s and the ratio."""
    from flatout import compare as comparison

    with plain_errors():
        check_data_dir(data_dir)
        check_environment(options["env"])
        check_environment(options["slow_env"])
        folder, uri, project = _project_facts(data_dir)
    if not comparison.has_tokens(folder):
        raise click.ClickException(
            f"no tokens in {folder}: run kedro run --pipelines=split,tokenize first"
        )
    with plain_errors():
        result = comparison.compare(project, folder, tracking_uri=uri, **options)
    for line in result.lines():
        click.echo(line)


@flatout.command()
@env_option
@click.option("--data-dir", help="Folder of the run's data. Default: data.")
@click.option("--tracking-uri", help="Another store than the runs were meant for.")
def sync(env: str | None, data_dir: str | None, tracking_uri: str | None) -> None:
    """Send to MLflow what it lacks of this folder's runs.

    They are the last training, the last other run, and what no store took of those
    before them. Models are not sent.
    """
    from flatout import tracking

    extra = {"data_dir": data_dir} if data_dir else {}
    with plain_errors():
        check_data_dir(data_dir)
        check_environment(env)
        with KedroSession.create(env=env, runtime_params=extra) as session:
            context = session.load_context()
            settings = checked_settings(context)
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


@flatout.command()
@click.argument("group", required=False)
@env_option
@click.option("--params", default="", callback=_split_params, help="As kedro run's.")
@click.option(
    "--markdown",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the page of all parameters to this file instead.",
)
def parameters(
    group: str | None, env: str | None, params: dict[str, Any], markdown: Path | None
) -> None:
    """Print every parameter of a run, or of one GROUP, and where it comes from."""
    from flatout.project.parameters import table as tables

    with plain_errors():
        tables.check_group(group)
        check_environment(env)
        with KedroSession.create(env=env, runtime_params=params) as session:
            loader = loader_of(session.load_context())
    if markdown:
        markdown.parent.mkdir(parents=True, exist_ok=True)
        markdown.write_text(tables.page(loader), encoding="utf-8")
    else:
        click.echo(tables.table(loader, group))


@flatout.command()
@click.option("--data-dir", help="Folder of the run's data. Default: data.")
def best(data_dir: str | None) -> None:
    """Print the best training of the last sweep, and write conf/best.

    kedro run --env=best trains with its settings.
    """
    from flatout.reports.best import best_lines, read_best, write_best

    with plain_errors():
        check_data_dir(data_dir)
        folder, _, project = _project_facts(data_dir)
        found = read_best(folder)
        file = write_best(project, found)
    for line in best_lines(found, file.relative_to(project)):
        click.echo(line)


@flatout.command()
@click.argument("file", required=False)
@click.option("--task", help="Of docs/tasks.md. Default: guessed.")
@click.option("--text-column", help="Default: guessed.")
@click.option("--label-column", help="Default: guessed.")
@click.option("--checkpoint", help="Name on the Hub, or folder. Default: from scratch.")
@click.option("--yes", is_flag=True, help="Ask nothing.")
@click.option("--force", is_flag=True, help="Replace what is in conf/local.")
@click.option("--conf", default="conf", type=click.Path(path_type=Path), hidden=True)
def init(file: str | None, yes: bool, force: bool, conf: Path, **known: Any) -> None:
    """Write conf/local for the data in FILE: its columns, task, lengths, batch size.

    FILE is a table (CSV, TSV, JSON lines, Parquet, Arrow), a folder or a URL of some.
    Without it conf/local gets templates of comments.
    """
    from flatout.project import first_settings

    folder, asks = conf / "local", not yes and sys.stdin.isatty()
    with plain_errors():
        if not force:
            first_settings.check_absent(folder)
        if file is None:
            written = first_settings.write_templates(folder)
        else:
            written = _first_settings(folder, file, asks=asks, **known)
    for path in written:
        click.echo(f"written: {path}")
    click.echo("Next: kedro flatout doctor checks it, kedro run trains.")


def _first_settings(
    folder: Path,
    file: str,
    *,
    task: str | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    checkpoint: str | None = None,
    asks: bool = False,
) -> list[Path]:
    from flatout.project import first_settings

    found, entry = first_settings.look_at(file, text_column, label_column)
    click.echo(f"{file}: {found.why}; task {found.task}.")
    if task is None and asks:
        task = click.prompt("Task (docs/tasks.md)", default=found.task)
    found = first_settings.with_task(found, task)
    return first_settings.write_settings(folder, found, entry, checkpoint)


@flatout.command(cls=ListsCommand)
@click.option("--data-path", metavar="FILE", help="Or a folder, or a URL.")
@click.option("--batch-sizes", metavar="N...", help="As in --batch-sizes 128 256 512.")
@click.option("--num-workers", metavar="N...", help="Loader processes.")
@click.option("--precisions", metavar="NAME...", help="fp32, bf16, fp16 or auto.")
@click.option("--prefetch", metavar="N...", help="Batches ahead a loader process.")
@click.option("--pin-memory", metavar="BOOL...", help="true, false or both.")
@click.option("--steps", type=AT_LEAST_1, help="Of a timed window.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--model", help="A checkpoint: name on the Hub, or folder.")
@click.option("--task", help="Of docs/tasks.md. Default: guessed.")
@click.option("--data-dir", help="Folder of the run's data. Default: data.")
@click.option("--force", is_flag=True, help="Replace what is in conf/local.")
@click.option("--conf-source", hidden=True)
@click.pass_context
def benchmark(
    context: click.Context,
    data_path: str | None,
    device: str,
    conf_source: str | None,
    data_dir: str | None,
    force: bool,
    **options: Any,
) -> Any:
    """Measure every combination of the lists, and recommend one (guide E).

    With --data-path conf/local is written first, as kedro flatout init does; without
    it the data are those of the project. Then it is kedro run
    --pipelines=split,tokenize,benchmark with benchmark.mode: grid.
    """
    from flatout.project import first_settings

    given = {"env": None, "pipelines": ("split", "tokenize", "benchmark"), "params": {}}
    with plain_errors():
        use_device(device)
        if data_path and (kind := first_settings.other_kind(Path(data_path))):
            given = of_samples(kind, data_path)
        elif data_path:
            folder = Path(conf_source or "conf") / "local"
            if not force:
                first_settings.check_absent(folder)
            known = {"task": options["task"], "checkpoint": options["model"]}
            _first_settings(folder, data_path, **known)
            options |= {"model": None, "task": None}  # they are in conf/local now
    given["params"] |= grid_parameters(options)
    given["params"] |= {"data_dir": data_dir} if data_dir else {}
    click.echo(f"kedro run --pipelines={','.join(given['pipelines'])}, mode grid")
    return context.invoke(run, conf_source=conf_source, **given)


@flatout.command()
@click.argument("logfile", type=click.Path(path_type=Path))
@click.option("--hours", type=float, required=True, help="That are allowed in all.")
@click.option("--steps", type=AT_LEAST_1, help="Of the whole, where the log is silent.")
def deadline(logfile: Path, hours: float, steps: int | None) -> None:
    """Tell from the LOGFILE of any training whether it will be done in time.

    Steps and times are read from plain lines, bars of tqdm and JSON lines.
    """
    from flatout.reports.deadline import deadline_lines, project

    if hours <= 0:
        raise click.BadParameter("hours must be above 0", param_hint="--hours")
    with plain_errors():
        found, left_out = project(logfile, steps)
    for line in deadline_lines(found, hours, left_out):
        click.echo(line)


def _project_facts(data_dir: str | None) -> tuple[Path, str, Path]:
    """Data folder, tracking store, project folder."""
    extra = {"data_dir": data_dir} if data_dir else {}
    with KedroSession.create(runtime_params=extra) as session:
        context = session.load_context()
    folder = context.project_path / (data_dir or "data")
    return folder, context.mlflow.server.mlflow_tracking_uri, context.project_path
