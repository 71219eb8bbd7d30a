"""Commands that answer questions about a training run: `verify`, `rows`, `gate`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from kedro.framework.cli.utils import env_option
from kedro.framework.context import KedroContext

from flatout.cli.groups import PARAMS, context_of, flatout, plain_errors
from flatout.engine.machine import environment
from flatout.engine.parameters import Settings
from flatout.engine.rows import row_kind
from flatout.pipelines import SPLITS, inputs_of
from flatout.pipelines.train import GROUPS
from flatout.project.command_line import CommandError
from flatout.project.config_loader import loader_of
from flatout.project.data.origin import data_fault

if TYPE_CHECKING:
    from flatout.engine.train.setup.job import TrainJob


def load_inputs(context: KedroContext) -> dict[str, Any]:
    """Return the inputs of the train pipeline by name: the splits, the label names and
    the tokenizer, if there is one. Before loading them, set the environment variables
    that torch reads when it is imported. Raises CommandError if an input does not exist
    yet."""
    settings, catalog = loader_of(context).settings, context.catalog
    environment.apply(settings.runtime)
    rows = row_kind(settings.train.rows).kind
    entries = inputs_of(rows)
    for entry in entries.values():
        if not catalog.exists(entry):
            made_by = "split,tokenize" if rows == "tokens" else rows
            raise CommandError(
                f"{entry} does not exist yet: create it with "
                f"kedro run --pipelines={made_by}"
            )
    return {name: catalog.load(entry) for name, entry in entries.items()}


def training_job(context: KedroContext) -> TrainJob:
    """Return the job that `kedro run --pipelines=train` would run. Raises any error
    that `kedro run` would raise before the first step."""
    inputs = load_inputs(context)
    from flatout.engine.launch.launch import make_job

    whole, tokenizer = loader_of(context).settings, inputs.get("tokenizer")
    settings = Settings(**{name: getattr(whole, name) for name in GROUPS})
    splits, names = {n: inputs[f"{n}_rows"] for n in SPLITS}, inputs["label_names"]
    return make_job(settings, splits, tokenizer, names)


@flatout.command()
@env_option
@PARAMS
@click.option(
    "--model",
    "folder",
    type=click.Path(path_type=Path),
    help="Compare the predictions of this saved model instead, on 200 test rows.",
)
def verify(env: str | None, params: dict[str, Any], folder: Path | None) -> None:
    """Compare one step of the configured training run with plain PyTorch.

    Dropout is off in both. The exit code is 1 if differences exceed rounding errors.
    Accepts the options of the planned run, and writes no files.
    """
    begin_s = time.perf_counter()
    with plain_errors():
        context = context_of(env, params)
        if folder is None:
            job = training_job(context)
            from flatout.engine.answers.step_check import verify_job

            verdict = verify_job(job)
        else:
            test = load_inputs(context)["test_rows"]
            from flatout.engine.answers.saved_model import verify_model

            verdict = verify_model(folder, test, loader_of(context).settings)
    seconds = time.perf_counter() - begin_s
    click.echo("\n".join(verdict.lines()) + f" ({seconds:.0f} s)")
    raise SystemExit(not verdict.is_sound)


@flatout.command()
@env_option
@PARAMS
@click.option("--step", type=int, help="List the rows of this step; steps start at 1.")
@click.option("--row", type=int, help="List the steps that train this row.")
@click.option(
    "--spike", is_flag=True, help="List the rows at the largest rise of the loss."
)
@click.option("--replay", is_flag=True, help="Add the loss of each row, largest first.")
@click.option(
    "--most",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Maximum number of rows shown.",
)
def rows(
    env: str | None,
    params: dict[str, Any],
    step: int | None,
    row: int | None,
    spike: bool,
    replay: bool,
    most: int,
) -> None:
    """List the rows of a step of the configured training run, or the steps of a row.

    Needs no log, and accepts the options of the run. --replay uses the nearest
    checkpoint, or the saved model, in fp32 and without dropout.
    """
    if [step, row, spike or None].count(None) != 2:
        raise click.UsageError("give one of --step, --row and --spike")
    with plain_errors():
        context = context_of(env, params)
        job = training_job(context)
        from flatout.engine.answers.row_steps import row_lines

        lines = row_lines(job, step=step, row=row, replays=replay, most=most)
        if fault := data_fault(context.catalog, loader_of(context).settings):
            lines.append(f"Note: {fault}")
    click.echo("\n".join(lines))


@flatout.command()
@env_option
@PARAMS
@click.option(
    "--baseline",
    required=True,
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
)
@click.option("--write", is_flag=True, help="Measure and write the baseline.")
@click.option("--steps", type=click.IntRange(min=20), default=100, show_default=True)
def gate(
    env: str | None, params: dict[str, Any], baseline: Path, write: bool, steps: int
) -> None:
    """Train a few steps three times, and compare throughput and loss with BASELINE.

    The exit code is 1 if either is worse. Accepts the options of the training run,
    whose models, reports and checkpoints are not changed.
    """
    with plain_errors():
        job = training_job(context_of(env, params))
        from flatout.engine.answers import gate as gates

        before = None if write else gates.Measured.read(baseline)
        if before is not None:  # before training, which takes minutes
            known = {"--steps": steps, "token_key": job.data_key}
            gates.check_comparable(known, before)
        now = gates.measure(job, steps)
        if before is None:
            now.write(baseline)
            click.echo(f"{baseline} is written")
            return
        gates.check_comparable(now.conditions, before)
    verdict, faults = gates.judge(now, before)
    click.echo(f"gate: failed, {'; '.join(faults)}" if faults else f"gate: {verdict}")
    raise SystemExit(bool(faults))
