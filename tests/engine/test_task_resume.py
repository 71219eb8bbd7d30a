"""An interrupted training run resumes bit for bit for each kind of target."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from flatout.engine.launch.launch import run_job
from tests.engine.families import BILM, CONFIGS, RECURRENT, rows_of, token_rows
from tests.engine.runs import crashed, curve
from tests.make import SPLITS, task_job

COMPLETIONS = "completions"
"""A causal-lm task in which the first tokens, the prompt, are not targets."""


def rows(task, count):
    """Return `count` rows with labels for `task`."""
    if task != COMPLETIONS:
        return token_rows(task, count)
    plain = token_rows("causal-lm", count)
    ids = [view.tolist() for view in plain.views(np.arange(count))]
    labels = pa.array([[-100, -100, *own[2:]] for own in ids], pa.list_(pa.int32()))
    return rows_of("causal-lm", ids, labels=labels)


def job_of(folder, task):
    kinds = {"next-key": "log_key_lstm", "bidirectional-lm": "bilm"}
    kind = {**kinds, COMPLETIONS: "llama"}.get(task, "bert")
    config = {"model_type": kind, **(CONFIGS | RECURRENT | BILM)[kind]}
    own = "causal-lm" if task == COMPLETIONS else task
    steps = {"checkpoint": {"every_steps": 2}, "evaluate_every": 4}
    job = task_job(folder, own, config, token_budget=240, **steps)
    return replace(job, **{name: rows(task, n) for name, n in SPLITS.items()})


TASKS = "multi-label-classification token-classification next-key bidirectional-lm"


@pytest.mark.parametrize("task", [*TASKS.split(), COMPLETIONS])
def test_an_interrupted_training_goes_on_bit_for_bit(tmp_path, task):
    whole = run_job(job_of(tmp_path / "whole", task))
    job = job_of(tmp_path / "crashed", task)
    crashed(job, "step 6/12  loss")
    again = run_job(job)
    assert again.report.resumed_from_step in range(2, 7)
    assert curve(again) == curve(whole)
    found, expected = again.report.as_dict(), whole.report.as_dict()
    figures = [n for n in expected if n.startswith(("test_", "validation_"))]
    assert figures and all(found[name] == expected[name] for name in figures)
