"""The report of a run from what was recorded."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Any

import torch

from flatout.engine import flops, health
from flatout.engine.assemble import Trainer
from flatout.engine.loader import StepLoader
from flatout.engine.recorder import Recorder
from flatout.engine.report import Evaluation, TrainReport
from flatout.engine.runtime import memory
from flatout.engine.timing import Rates, Window, compile_clock, steady

logger = logging.getLogger(__name__)


def build_report(
    recorder: Recorder, loader: StepLoader, test: Evaluation, exit_reason: str
) -> TrainReport:
    """All figures of a session; warnings about its health are logged here."""
    trainer = recorder.trainer
    runtime, settings = trainer.runtime, trainer.job.settings
    best = recorder.best or Evaluation(float("nan"), None)
    seconds, history = recorder.watch.seconds, recorder.history
    chance = health.chance_loss(
        settings.model.task, trainer.num_classes or trainer.job.vocabulary.size
    )
    return TrainReport(
        **asdict(Rates.over(recorder.windows)),
        **efficiency(trainer, recorder.windows),
        **memory(runtime),
        **recorder.conditions.figures(),
        **settled(trainer),
        compile_s=compile_clock.seconds,
        recompiles=compile_clock.recompiles,
        first_batch_s=recorder.first_batch_s,
        evaluate_s=seconds.get("evaluate", 0.0),
        checkpoint_s=seconds.get("checkpoint", 0.0),
        train_wall_s=time.perf_counter() - recorder.begin_s,
        samples=recorder.samples,
        num_workers=loader.num_workers,
        initial_loss=recorder.initial_loss,
        final_loss=history[-1].loss if history else float("nan"),
        chance_loss=chance,
        validation_loss=best.loss,
        validation_accuracy=best.accuracy,
        test_loss=test.loss,
        test_accuracy=test.accuracy,
        resumed_from_step=recorder.start_step or None,
        exit_reason=exit_reason,
        warnings=_warnings(recorder, chance),
        versions=versions(),
    )


def settled(trainer: Trainer) -> dict[str, Any]:
    """What runs, after all `auto` were settled."""
    runtime, choices = trainer.runtime, trainer.choices
    return {
        "steps": trainer.total_steps,
        "epochs": trainer.total_steps / trainer.data.batches.steps_per_epoch,
        "world_size": runtime.ranks.world_size,
        "global_batch_size": trainer.job.settings.train.global_batch_size,
        "token_budget": choices.token_budget,
        "strategy": choices.strategy,
        "precision": runtime.precision,
        "residual": choices.residual,
        "attention": choices.attention,
        "compile": choices.compile,
        "cuda_graphs": choices.cuda_graphs,
        "device": runtime.device_name,
        "threads": runtime.threads,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
    }


def efficiency(trainer: Trainer, windows: list[Window]) -> dict[str, Any]:
    """Model TFLOPs a second and device over steady windows, and the share of peak."""
    chosen = steady(windows)
    wall_s = sum(window.wall_s for window in chosen) or float("nan")
    model_flops = flops.ModelFlops.of(trainer.model.model, trainer.model.narrowed)
    total = sum(model_flops.of_window(window) for window in chosen)
    tflops = total / wall_s / trainer.runtime.ranks.world_size / 1e12
    peak = flops.peak_tflops(trainer.runtime.device_name)
    return {
        "tflops_per_s": tflops,
        "mfu_pct": None if peak is None else 100 * tflops / peak,
    }


def _warnings(recorder: Recorder, chance: float | None) -> list[str]:
    trainer = recorder.trainer
    scratch = trainer.job.settings.model.name_or_path is None
    norms = [point.grad_norm for point in recorder.history]
    found = [
        health.initial_loss_warning(recorder.initial_loss, chance) if scratch else None,
        health.grad_norm_warning(norms),
        health.cpu_wait_warning(
            recorder.conditions.figures()["cpu_wait_pct"],
            trainer.runtime.threads,
            on_cpu=not trainer.runtime.is_cuda,
        ),
    ]
    texts = [text for text in found if text]
    if trainer.runtime.ranks.is_main:
        for text in texts:
            logger.warning(text)
    return [*trainer.choices.notes, *texts, *recorder.warnings]


def versions() -> dict[str, str]:
    import accelerate
    import transformers

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "cuda": torch.version.cuda or "",
    }
