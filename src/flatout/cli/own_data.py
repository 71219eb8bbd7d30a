"""Commands that start from the user's own file: `init`, `benchmark`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from flatout.cli.grid import ListsCommand, grid_parameters, use_device
from flatout.cli.groups import DATA_DIR, flatout, plain_errors
from flatout.cli.run import run
from flatout.engine.machine.environment import nvidia_gpu_count
from flatout.engine.parameters import parse_settings


@flatout.command()
@click.argument("file")
@click.option("--task", help="Of docs/tasks.md. Default: guessed.")
@click.option("--text-column", help="Default: guessed.")
@click.option("--label-column", help="Default: guessed.")
@click.option("--checkpoint", help="Name on the Hub, or folder. Default: from scratch.")
@click.option("--yes", is_flag=True, help="Ask nothing.")
@click.option("--force", is_flag=True, help="Replace what is in conf/local.")
@click.option("--conf", default="conf", type=click.Path(path_type=Path), hidden=True)
def init(file: str, yes: bool, conf: Path, **known: Any) -> None:
    """Write conf/local for the data in FILE: its columns, task, lengths, batch size.

    FILE is a table (CSV, TSV, JSON lines, Parquet, Arrow), a folder or a URL of tables.
    """
    asks = not yes and sys.stdin.isatty()
    with plain_errors():
        written = _first_settings(conf / "local", file, asks=asks, **known)
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
    force: bool = False,
) -> list[Path]:
    from flatout.project.init import settings as first_settings

    if not force and asks:
        first_settings.check_absent(folder)
    found, entry = first_settings.look_at(file, text_column, label_column)
    click.echo(f"{file}: {found.why}; task {found.task}.")
    if task is None and asks:
        task = click.prompt("Task (docs/tasks.md)", default=found.task)
    found = first_settings.with_task(found, task)
    texts = first_settings.settings_texts(found, entry, checkpoint)
    if not force:
        first_settings.check_absent(folder, texts)
    return first_settings.write_settings(folder, texts)


PIPELINES = ("split", "tokenize", "benchmark")


def _by_init(context: click.Context, option: click.Parameter, given: Any) -> None:
    """Answer an option of earlier versions with its replacement."""
    if given:
        name = option.opts[0]
        context.fail(
            f"{name} was removed in this version. kedro flatout init FILE {name}; then "
            "kedro flatout benchmark without --data-path"
        )


@flatout.command(cls=ListsCommand)
@click.option("--data-path", metavar="FILE", help="Or a folder, or a URL.")
@click.option("--batch-sizes", metavar="N...", help="As in --batch-sizes 128 256 512.")
@click.option("--num-workers", metavar="N...", help="Loader processes.")
@click.option("--precisions", metavar="NAME...", help="fp32, bf16, fp16 or auto.")
@click.option("--prefetch", metavar="N...", help="Batches ahead a loader process.")
@click.option("--pin-memory", metavar="BOOL...", help="true, false or both.")
@click.option("--steps", type=click.IntRange(min=2), help="Of a timed window.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--model", help="A checkpoint: name on the Hub, or folder.")
@click.option("--task", help="Of docs/tasks.md. Default: guessed.")
@DATA_DIR
@click.option("--conf-source", hidden=True)
@click.option("--text-column", hidden=True, expose_value=False, callback=_by_init)
@click.option("--label-column", hidden=True, expose_value=False, callback=_by_init)
@click.option(
    "--force", is_flag=True, hidden=True, expose_value=False, callback=_by_init
)
@click.pass_context
def benchmark(
    context: click.Context,
    data_path: str | None,
    device: str,
    conf_source: str | None,
    data_dir: str | None,
    **options: Any,
) -> Any:
    """Measure every combination of the lists, and recommend one.

    With --data-path, conf/local is written first, as by kedro flatout init (which also
    accepts column names); otherwise the project's data are used. Then it is kedro run
    --pipelines=split,tokenize,benchmark with benchmark.mode: grid.
    """
    with plain_errors():
        use_device(device)
        parse_settings({"benchmark": grid_parameters(options)["benchmark"]})
        if options["pin_memory"] and not nvidia_gpu_count():
            click.echo("--pin-memory: no GPU is seen here to copy to; not tried.")
        if data_path:
            known = {"checkpoint": options.pop("model"), "task": options.pop("task")}
            folder = Path(conf_source or "conf") / "local"
            _first_settings(folder, data_path, **known)
    params = grid_parameters(options) | ({"data_dir": data_dir} if data_dir else {})
    click.echo(f"kedro run --pipelines={','.join(PIPELINES)}, mode grid")
    return context.invoke(
        run, env=None, pipelines=PIPELINES, params=params, conf_source=conf_source
    )
