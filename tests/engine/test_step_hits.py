"""Which steps count right predictions."""

from __future__ import annotations

from dataclasses import replace

import torch

from flatout.engine.machine.environment import Ranks
from flatout.engine.machine.runtime import Runtime
from flatout.engine.ops.attention import PACKED
from flatout.engine.parameters import TrainSettings
from flatout.engine.train.optimizer import Updater, build_optimizer
from flatout.engine.train.step import Stepper
from tests.engine.families import step_rows, task_model

CPU = Runtime(torch.device("cpu"), "CPU", "fp32", Ranks(), threads=1)


def test_hits_are_counted_every_few_steps_from_the_first():
    model = task_model("bert", "sequence-classification", PACKED)
    options = {"fused": True, "capturable": False}
    optimizer = build_optimizer(model, TrainSettings(learning_rate=1e-9), **options)
    run = Stepper(
        model,
        Updater(optimizer, 1.0, fused=True),
        CPU,
        metrics_every=3,
        hits=model.task.hits,
    )
    batch = step_rows("bert", "sequence-classification", "packed")[0]
    judged = []
    for step in range(7):
        run(replace(batch, step=step))
        judged.append(int(run.sums.judged))
    rows = batch.num_samples
    assert judged == [rows, rows, rows, 2 * rows, 2 * rows, 2 * rows, 3 * rows]
