"""Build the report of a run from what its Recorder has collected."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from flatout.engine.batches.loader import StepLoader
from flatout.engine.machine.runtime import Runtime, memory
from flatout.engine.models import flops
from flatout.engine.train.recording import health
from flatout.engine.train.recording.recorder import Recorder
from flatout.engine.train.recording.report import Evaluation, TrainReport
from flatout.engine.train.recording.timing import (
    Rates,
    Window,
    compile_clock,
    seconds_of,
    steady,
)
from flatout.engine.train.setup.assemble import Trainer

PEAK_SECONDS = 0.1
RESOLVED = (
    *("token_budget", "strategy", "residual", "attention"),
    *("compile", "cuda_graphs", "compile_reason"),
)
"""The fields of a ResolvedConfig that the report contains."""


def build_report(
    recorder: Recorder, loader: StepLoader, test: Evaluation
) -> TrainReport:
    """Return the report of a session. Warnings about its health are logged."""
    trainer = recorder.trainer
    runtime = trainer.runtime
    best = recorder.best or Evaluation(float("nan"))
    seconds, history = recorder.seconds, recorder.history
    windows = recorder.windows
    wall_s = time.perf_counter() - recorder.begin_s
    return TrainReport(
        **asdict(Rates.over(windows)),
        **(reached := efficiency(trainer, windows)),
        **_measured_peak(runtime, reached["tflops_per_s"]),
        **memory(runtime),
        **recorder.conditions.figures(),
        **resolved_parameters(trainer),
        compile_s=compile_clock.seconds,
        recompiles=compile_clock.recompiles,
        first_batch_s=recorder.first_batch_s,
        evaluate_s=seconds["evaluate"],
        checkpoint_s=seconds["checkpoint"],
        train_wall_s=wall_s,
        phases_s=_phases(recorder, wall_s),
        samples=recorder.samples,
        num_workers=loader.num_workers,
        initial_loss=recorder.initial_loss,
        final_loss=history[-1].loss if history else float("nan"),
        chance_loss=recorder.chance_loss,
        validation_loss=best.loss,
        validation_accuracy=best.accuracy,
        test_loss=test.loss,
        test_accuracy=test.accuracy,
        metrics=best.named("validation") | test.named("test"),
        resumed_from_step=recorder.start_step or None,
        exit_reason=recorder.exit_reason,
        warnings=_warnings(recorder),
        versions=versions(),
    )


def _phases(recorder: Recorder, wall_s: float) -> dict[str, float]:
    """Split `wall_s` into phases and return the time in seconds of each phase.
    Compilation is a separate phase, although most of it happens in the first step."""
    seconds, compile_s = recorder.seconds, compile_clock.seconds
    early_s = recorder.compiled_before_s
    first_s = recorder.compiled_first_s - early_s
    parts = {
        "model": recorder.setup_s - early_s,
        "compilation": compile_s,
        "first_step": max(0.0, recorder.first_batch_s - first_s),
        "evaluation": seconds["evaluate"] + seconds["audit"],
        "checkpoints": seconds["checkpoint"],
    }
    if "callbacks" in seconds:
        parts["callbacks"] = seconds["callbacks"]
    return {**parts, "steps": max(0.0, wall_s - sum(parts.values()))}


def resolved_parameters(trainer: Trainer) -> dict[str, Any]:
    """Return the settings of the run, with every `auto` resolved."""
    runtime, resolved = trainer.runtime, trainer.resolved
    return {
        "steps": trainer.total_steps,
        "epochs": trainer.total_steps / trainer.data.batches.steps_per_epoch,
        "world_size": runtime.ranks.world_size,
        "global_batch_size": trainer.job.settings.train.global_batch_size,
        **{name: getattr(resolved, name) for name in RESOLVED},
        "precision": runtime.precision,
        "device": runtime.device_name,
        "threads": runtime.threads,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
    }


def efficiency(trainer: Trainer, windows: list[Window]) -> dict[str, Any]:
    """Return the model's TFLOP/s per device, also as a percentage of the data sheet's
    peak. Windows with compilation are left out."""
    chosen = steady(windows)
    model_flops = flops.ModelFlops.of(trainer.model.model)
    total = sum(
        model_flops.over(window.tokens, window.targets, window.attention_pairs)
        for window in chosen
    )
    tflops = total / seconds_of(chosen) / trainer.runtime.ranks.world_size / 1e12
    peak = flops.peak_tflops(trainer.runtime.device_name)
    return {"tflops_per_s": tflops, "mfu_pct": _share_pct(tflops, peak)}


def _measured_peak(runtime: Runtime, tflops: float) -> dict[str, Any]:
    """Return the measured matmul throughput of this GPU, and `tflops` as a percentage
    of it. Both are None on a CPU or if memory is full."""
    peak = None
    if runtime.is_cuda:
        with suppress(torch.OutOfMemoryError):
            peak = flops.measured_tflops(runtime, PEAK_SECONDS)
    share = _share_pct(tflops, peak)
    return {"peak_tflops_measured": peak, "share_of_measured_peak_pct": share}


def _share_pct(tflops: float, peak: float | None) -> float | None:
    return None if peak is None else 100 * tflops / peak


def _warnings(recorder: Recorder) -> list[str]:
    """Return all warnings of the run, including those that appear only at its end."""
    recorder.check_health()
    job, notes = recorder.trainer.job, recorder.trainer.resolved.notes
    few = health.few_rows_warning(job.test.facts.label_counts, job.label_names)
    if few:
        recorder.warn("rows", few)
    return [*notes, *recorder.problems.values(), *recorder.warnings]


def versions() -> dict[str, str]:
    import accelerate
    import transformers

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "cuda": torch.version.cuda or "",
    }
