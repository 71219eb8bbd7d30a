"""The `kedro flatout benchmark` command, which runs the benchmark in `grid` mode."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from flatout.cli.groups import DATA_DIR, flatout, plain_errors
from flatout.cli.own_data import first_settings
from flatout.cli.run import run
from flatout.engine.machine.environment import hide_gpus, nvidia_gpu_count
from flatout.engine.parameters import parse_settings

PIPELINES = ("split", "tokenize", "benchmark")
LISTS = frozenset(
    {"--batch-sizes", "--num-workers", "--precisions", "--prefetch", "--pin-memory"}
)
"""Options that accept several values."""


class ListsCommand(click.Command):
    """Command whose options accept several values: `--batch-sizes 128 256 512`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        joined: list[str] = []
        collects = False
        for word in args:
            name, _, value = word.partition("=")
            if name in LISTS:
                joined += [name, value]
            elif collects and not re.match(r"-(?!\d)", word):  # -1 is a value
                joined[-1] = f"{joined[-1]} {word}".strip()
                continue
            else:
                joined.append(word)
            collects = name in LISTS
        for name, value in pairwise(joined):
            if name in LISTS and not value:
                raise click.UsageError(f"{name} needs at least one value", ctx)
        return super().parse_args(ctx, joined)


def grid_parameters(
    lists: Mapping[str, str | None], model: str | None, task: str | None
) -> dict[str, Any]:
    """Return the parameters that correspond to the command-line options. Options that
    are not given are left out."""
    found = {"mode": "grid", "free_global_batch": True}
    named = {"name_or_path": model, "task": task}
    groups = {"benchmark": {**found, **lists}, "model": named}
    given = {g: {k: v for k, v in o.items() if v} for g, o in groups.items()}
    return {group: options for group, options in given.items() if options}


@flatout.command(cls=ListsCommand)
@click.option("--data-path", metavar="FILE", help="File, folder or URL of the data.")
@click.option("--batch-sizes", metavar="N...", help="For example 128 256 512.")
@click.option("--num-workers", metavar="N...", help="Numbers of loader processes.")
@click.option("--precisions", metavar="NAME...", help="fp32, bf16, fp16 or auto.")
@click.option(
    "--prefetch", "prefetch_factors", metavar="N...", help="Batches per loader process."
)
@click.option("--pin-memory", metavar="BOOL...", help="true, false or both.")
@click.option(
    "--steps", "steps_per_trial", type=click.IntRange(min=2), help="Steps per window."
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--model", help="Checkpoint: name on the Hub, or folder.")
@click.option("--task", help="A task of docs/tasks.md. Default: guessed.")
@DATA_DIR
@click.option("--conf-source", hidden=True)
@click.pass_context
def benchmark(
    context: click.Context,
    data_path: str | None,
    device: str,
    model: str | None,
    task: str | None,
    conf_source: str | None,
    data_dir: str | None,
    **lists: Any,
) -> Any:
    """Measure all combinations of the given values, and recommend one.

    If --data-path is given, conf/local is written first, as by kedro flatout init
    (which also accepts column names). Otherwise the project's data is used. The
    command then runs kedro run --pipelines=split,tokenize,benchmark with
    benchmark.mode: grid.
    """
    if device == "cuda" and not nvidia_gpu_count():
        context.fail("--device cuda: no GPU is visible; use cpu or auto")
    with plain_errors():
        if device == "cpu":
            hide_gpus()
        parse_settings(grid_parameters(lists, None, None))
        if lists["pin_memory"] and not nvidia_gpu_count():
            click.echo("--pin-memory is not tried, because no GPU is visible.")
        if data_path:
            folder = Path(conf_source or "conf") / "local"
            first_settings(folder, data_path, task=task, checkpoint=model)
            model = task = None
    params = grid_parameters(lists, model, task)
    params |= {"data_dir": data_dir} if data_dir else {}
    click.echo(f"kedro run --pipelines={','.join(PIPELINES)}, mode grid")
    return context.invoke(
        run, env=None, pipelines=PIPELINES, params=params, conf_source=conf_source
    )
