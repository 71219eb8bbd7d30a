"""The command `kedro run`, with readable errors."""

from __future__ import annotations

from typing import Any

import click
from kedro.framework.cli.project import run as kedro_run

from flatout.cli.groups import cli, plain_errors
from flatout.project.command_line import check_command
from flatout.project.terminal import show_kedro

VERBOSE = click.Option(["-v", "--verbose"], is_flag=True, help="Also show Kedro's log.")
RUN_HELP = """Run pipelines; without names split, tokenize, train and evaluate.

\b
Pipelines: split, tokenize, arrays, images, train, evaluate, predict, detect, mine,
export, benchmark, sweep, crossvalidate.

\b
Examples:
  kedro run --params=train.epochs=3,train.learning_rate=5e-5
  kedro run --pipelines=train --env=bert_base
  kedro run --pipelines=benchmark
"""


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
        # Kedro accepts both options, but prints a deprecation warning for this one.
        options |= {"pipelines": [options["pipeline"]], "pipeline": None}
    with plain_errors():
        check_command(options)
        return kedro_run.callback(**options)
