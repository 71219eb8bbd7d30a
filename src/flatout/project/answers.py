"""The configured training as a job of the engine, for commands that ask about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kedro.framework.context import KedroContext

from flatout.engine.machine import environment
from flatout.engine.parameters import Settings
from flatout.pipelines import SPLITS, inputs_of
from flatout.pipelines.train import GROUPS
from flatout.project.command_line import CommandError
from flatout.project.config_loader import loader_of

if TYPE_CHECKING:
    from flatout.engine.train.setup.job import TrainJob

MADE_BY = {"tokens": "split,tokenize"}
"""Pipelines that make the rows; others have the name of the rows."""


def load_inputs(context: KedroContext) -> dict[str, Any]:
    """Load `train_rows`, ..., `tokenizer` and `label_names`. Sets the environment of
    torch before it is imported. Raises CommandError if the rows are not made yet."""
    settings = loader_of(context).settings
    environment.apply(settings.runtime)
    rows, catalog = settings.train.rows, context.catalog
    entries = inputs_of(rows)
    for entry in entries.values():
        if not catalog.exists(entry):
            made_by = MADE_BY.get(rows, rows)
            raise CommandError(
                f"{entry} is not there yet: kedro run --pipelines={made_by} makes it"
            )
    return {name: catalog.load(entry) for name, entry in entries.items()}


def training_job(context: KedroContext) -> TrainJob:
    """Return the job that `kedro run --pipelines=train` would train. Raises what it
    would raise before its first step."""
    inputs = load_inputs(context)
    from flatout.engine.launch.launch import make_job
    from flatout.engine.tokenizing.token_keys import check_tokens_match

    whole, tokenizer = loader_of(context).settings, inputs.get("tokenizer")
    settings = Settings(**{name: getattr(whole, name) for name in GROUPS})
    splits, names = {n: inputs[f"{n}_rows"] for n in SPLITS}, inputs["label_names"]
    if tokenizer is not None:
        check_tokens_match(splits, settings, tokenizer, names)
    return make_job(settings, splits, tokenizer, names)
