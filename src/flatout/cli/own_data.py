"""The command `init`, which configures the project for the user's own data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from flatout.cli.groups import flatout, plain_errors


@flatout.command()
@click.argument("file")
@click.option("--task", help="A task of docs/tasks.md. Default: guessed.")
@click.option("--text-column", help="Default: guessed.")
@click.option("--label-column", help="Default: guessed.")
@click.option("--checkpoint", help="Name on the Hub or folder. Default: from scratch.")
@click.option("--force", is_flag=True, help="Replace existing files in conf/local.")
@click.option("--conf", default="conf", type=click.Path(path_type=Path), hidden=True)
def init(file: str, conf: Path, **known: Any) -> None:
    """Write conf/local for the data in FILE: columns, task, lengths and batch size.

    FILE is a table (CSV, TSV, JSON lines, Parquet, Arrow), or a folder or URL of
    tables.
    """
    with plain_errors():
        written = first_settings(conf / "local", file, **known)
    for path in written:
        click.echo(f"written: {path}")
    click.echo("Next: kedro doctor checks the settings, kedro run trains.")


def first_settings(
    folder: Path,
    file: str,
    *,
    task: str | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    checkpoint: str | None = None,
    force: bool = False,
) -> list[Path]:
    from flatout.project.init import settings

    found, entry = settings.inspect_file(file, text_column, label_column, task)
    click.echo(f"{file}: {found.why}; task {found.task}.")
    texts = settings.settings_texts(found, entry, checkpoint)
    if not force:
        settings.check_absent(folder, texts)
    return settings.write_settings(folder, texts)
