"""train(): the one long readable function."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from flatout.engine import flops, health
from flatout.engine.assemble import (
    Trainer,
    TrainJob,
    Wrap,
    assemble,
    make_collator,
    make_planner,
)
from flatout.engine.evaluate import evaluate
from flatout.engine.loader import StepLoader
from flatout.engine.optim import learning_rate, set_learning_rate
from flatout.engine.report import Evaluation, LogPoint, TrainReport
from flatout.engine.runtime import Runtime
from flatout.engine.step import StepSums
from flatout.engine.timing import (
    WARMUP_STEPS,
    Rates,
    Stopwatch,
    Window,
    WindowClock,
    compile_clock,
    steady,
)
from flatout.engine.tokens import TokenRows

logger = logging.getLogger(__name__)


@dataclass
class TrainResult:
    """What a run gives back on the main rank."""

    model_folder: Path
    """The best model by validation loss, `save_pretrained`."""
    last_model_folder: Path
    report: TrainReport
    history: list[LogPoint]
    confusion: list[list[int]] | None
    """On the test split: confusion[true][predicted]."""


@dataclass
class Progress:
    """What has happened so far in this session."""

    history: list[LogPoint] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    samples: int = 0
    first_batch_s: float = 0.0
    initial_loss: float = float("nan")
    best: Evaluation | None = None
    resumed_from_step: int | None = None
    watch: Stopwatch = field(default_factory=Stopwatch)
    warnings: list[str] = field(default_factory=list)


def train(job: TrainJob, runtime: Runtime, wrap: Wrap | None = None) -> TrainResult:
    """Train `job` on this rank. Raises NonFiniteError, SettingsError, ModelError."""
    begin_s = time.perf_counter()
    compile_clock.listen()
    trainer = assemble(job, runtime, wrap)
    announce(trainer)
    progress = Progress()
    start_step = 0
    loader = StepLoader(
        trainer.data,
        job.settings.train.loader,
        runtime,
        start_step,
        trainer.total_steps,
    )
    clock = WindowClock(runtime.device)
    metrics = MetricsFile(job.metrics_file, enabled=runtime.ranks.is_main)
    bookkeeping = Bookkeeping(job)
    trainer.model.train()
    loop_begin_s = time.perf_counter()
    for batch in loader:
        rate = learning_rate(job.settings.train, batch.step, trainer.total_steps)
        set_learning_rate(trainer.optimizer, rate)
        clock.step_begins()
        trainer.stepper(batch)
        clock.step_ends(batch, loader.wait_s)
        progress.samples += batch.num_samples
        bookkeeping.after_step(trainer, batch.step, rate)
        done = batch.step + 1  # steps done so far
        session_steps = done - start_step
        if session_steps == 1:
            # The one wait outside of log points: how long the first step took.
            progress.initial_loss = _read_loss(trainer)
            progress.first_batch_s = time.perf_counter() - loop_begin_s
        if session_steps == WARMUP_STEPS and done < trainer.total_steps:
            runtime.synchronize()
            clock.begin()
        elif done % job.settings.train.log_every == 0 or done == trainer.total_steps:
            point = _log(trainer, progress, clock, batch, rate, begin_s)
            metrics.write(done, point.as_metrics())
        if _evaluation_due(trainer, done):
            _validate(trainer, progress, metrics, done)
            clock.begin()
    test = _finish(trainer, progress)
    report = _report(trainer, progress, loader, test, begin_s)
    metrics.write(trainer.total_steps, final_metrics(report))
    return TrainResult(
        model_folder=job.work_folder / "best",
        last_model_folder=job.work_folder / "last",
        report=report,
        history=progress.history,
        confusion=test.confusion,
    )


def announce(trainer: Trainer) -> None:
    """Say what really runs: kernel, type, fallbacks."""
    runtime, choices, train = (
        trainer.runtime,
        trainer.choices,
        trainer.job.settings.train,
    )
    if not runtime.ranks.is_main:
        return
    logger.info(
        "training on %s x %d, %s, strategy %s, attention %s, compile %s, CUDA graphs %s",
        runtime.device_name,
        runtime.ranks.world_size,
        runtime.precision,
        choices.strategy,
        choices.attention,
        choices.compile,
        choices.cuda_graphs,
    )
    logger.info(
        "%d steps of %d samples, token budget %d, %d threads",
        trainer.total_steps,
        train.global_batch_size,
        choices.token_budget,
        runtime.threads,
    )
    for note in choices.notes:
        logger.warning(note)


def _read_loss(trainer: Trainer) -> float:
    """Mean loss of the last step over all ranks; waits for the device."""
    loss = trainer.stepper.sums.last_loss.detach().clone()
    if trainer.runtime.ranks.world_size > 1:
        torch.distributed.all_reduce(loss)
    return float(loss)


def _log(
    trainer: Trainer,
    progress: Progress,
    clock: WindowClock,
    batch: Any,
    rate: float,
    begin_s: float,
) -> LogPoint:
    """Read the device's sums, close the window, note a point of the history."""
    figures = _read_sums(trainer)  # here the host waits for the device
    window = clock.close()
    progress.windows.append(window)
    bad_step = int(figures["first_bad_step"])
    if bad_step < StepSums.NEVER:
        _stop(trainer, bad_step, figures)
    wall_s = window.wall_s
    point = LogPoint(
        step=batch.step + 1,
        epoch=(batch.step + 1) / trainer.data.batches.steps_per_epoch,
        loss=figures["loss"] / max(1, window.steps),
        learning_rate=rate,
        grad_norm=figures["last_norm"],
        samples_per_s=window.samples / wall_s,
        tokens_per_s=window.tokens / wall_s,
        padded_tokens_per_s=window.padded_tokens / wall_s,
        loader_wait_pct=100 * window.wait_s / wall_s,
        elapsed_s=time.perf_counter() - begin_s,
        train_accuracy=_accuracy(figures),
    )
    progress.history.append(point)
    if trainer.runtime.ranks.is_main:
        logger.info(
            "step %d/%d  loss %.4f  %.1f samples/s  %.0f tokens/s  loader wait %.1f %%",
            point.step,
            trainer.total_steps,
            point.loss,
            point.samples_per_s,
            point.tokens_per_s,
            point.loader_wait_pct,
        )
    return point


def _read_sums(trainer: Trainer) -> dict[str, float]:
    """One transfer for all figures; summed over ranks."""
    sums = trainer.stepper.sums
    shared = torch.stack([sums.loss.double(), sums.hits.double(), sums.judged.double()])
    bad = sums.first_bad_step.clone()
    if trainer.runtime.ranks.world_size > 1:
        torch.distributed.all_reduce(shared)
        torch.distributed.all_reduce(bad, op=torch.distributed.ReduceOp.MIN)
    local = torch.stack([sums.last_norm.double(), bad.double()])
    names = ("loss", "hits", "judged", "last_norm", "first_bad_step")
    values = torch.cat([shared, local]).tolist()
    sums.reset()
    return dict(zip(names, values, strict=True))


def _accuracy(figures: dict[str, float]) -> float | None:
    return figures["hits"] / figures["judged"] if figures["judged"] else None


def _stop(trainer: Trainer, step: int, figures: dict[str, float]) -> None:
    raise health.BadStep(
        step=step,
        row_ids=trainer.data.batches.rows(step),
        learning_rate=learning_rate(
            trainer.job.settings.train, step, trainer.total_steps
        ),
        loss=_read_loss(trainer),
        grad_norm=figures["last_norm"],
        last_checkpoint=None,
    ).error()


def _evaluation_due(trainer: Trainer, done: int) -> bool:
    every = trainer.job.settings.train.evaluate_every
    if done == trainer.total_steps:
        return True
    if every is None:
        return False
    if every == "epoch":
        return done % trainer.data.batches.steps_per_epoch == 0
    return done % int(every) == 0


def _validate(
    trainer: Trainer, progress: Progress, metrics: MetricsFile, done: int
) -> None:
    """Loss on the validation split; the best model so far is kept on disk."""
    with progress.watch.phase("evaluate"):
        result = _evaluate(trainer, trainer.job.validation)
    named = {"validation_loss": result.loss}
    if result.accuracy is not None:
        named["validation_accuracy"] = result.accuracy
    metrics.write(done, named)
    if trainer.runtime.ranks.is_main:
        shown = "  ".join(f"{name} {value:.4f}" for name, value in named.items())
        logger.info("step %d/%d  %s", done, trainer.total_steps, shown)
    if progress.best is None or result.loss < progress.best.loss:
        progress.best = result
        with progress.watch.phase("checkpoint"):
            save_model(trainer, "best")


def _evaluate(trainer: Trainer, rows: TokenRows) -> Evaluation:
    settings, runtime = trainer.job.settings, trainer.runtime
    config = trainer.model.model.config
    return evaluate(
        trainer.model,
        rows,
        make_planner(settings, runtime, trainer.choices),
        make_collator(trainer.job, runtime, trainer.choices, config),
        runtime,
        trainer.num_classes,
    )


def save_model(trainer: Trainer, name: str) -> None:
    """`save_pretrained` under the work folder: safetensors, plain transformers."""
    if trainer.runtime.ranks.is_main:
        folder = trainer.job.work_folder / name
        trainer.model.model.save_pretrained(folder)
    if trainer.runtime.ranks.world_size > 1:
        torch.distributed.barrier()


def _finish(trainer: Trainer, progress: Progress) -> Evaluation:
    """Save the last model, test the best one."""
    with progress.watch.phase("checkpoint"):
        save_model(trainer, "last")
    _load_weights(trainer, trainer.job.work_folder / "best")
    with progress.watch.phase("evaluate"):
        return _evaluate(trainer, trainer.job.test)


def _load_weights(trainer: Trainer, folder: Path) -> None:
    from safetensors.torch import load_model

    load_model(
        trainer.model.model,
        folder / "model.safetensors",
        device=str(trainer.runtime.device),
    )


def _report(
    trainer: Trainer,
    progress: Progress,
    loader: StepLoader,
    test: Evaluation,
    begin_s: float,
) -> TrainReport:
    runtime, choices, settings = trainer.runtime, trainer.choices, trainer.job.settings
    best = progress.best or Evaluation(float("nan"), None)
    chance = health.chance_loss(
        settings.model.task, trainer.num_classes or trainer.job.vocabulary.size
    )
    _note_health(trainer, progress, chance)
    tflops = _tflops(trainer, progress.windows)
    peak = flops.peak_tflops(runtime.device_name)
    return TrainReport(
        **asdict(Rates.over(progress.windows)),
        **_memory(runtime),
        mfu_pct=None if peak is None else 100 * tflops / peak,
        tflops_per_s=tflops,
        compile_s=compile_clock.seconds,
        recompiles=max(0, compile_clock.count - 1),
        first_batch_s=progress.first_batch_s,
        evaluate_s=progress.watch.seconds.get("evaluate", 0.0),
        checkpoint_s=progress.watch.seconds.get("checkpoint", 0.0),
        train_wall_s=time.perf_counter() - begin_s,
        samples=progress.samples,
        steps=trainer.total_steps,
        epochs=trainer.total_steps / trainer.data.batches.steps_per_epoch,
        world_size=runtime.ranks.world_size,
        global_batch_size=settings.train.global_batch_size,
        token_budget=choices.token_budget,
        strategy=choices.strategy,
        precision=runtime.precision,
        attention=choices.attention,
        compile=choices.compile,
        cuda_graphs=choices.cuda_graphs,
        num_workers=loader.num_workers,
        device=runtime.device_name,
        threads=runtime.threads,
        parameters=sum(p.numel() for p in trainer.model.parameters()),
        initial_loss=progress.initial_loss,
        final_loss=progress.history[-1].loss if progress.history else float("nan"),
        chance_loss=chance,
        validation_loss=best.loss,
        validation_accuracy=best.accuracy,
        test_loss=test.loss,
        test_accuracy=test.accuracy,
        resumed_from_step=progress.resumed_from_step,
        warnings=progress.warnings,
        versions=versions(),
    )


def _note_health(trainer: Trainer, progress: Progress, chance: float | None) -> None:
    scratch = trainer.job.settings.model.name_or_path is None
    found = [
        health.initial_loss_warning(progress.initial_loss, chance) if scratch else None,
        health.grad_norm_warning([point.grad_norm for point in progress.history]),
    ]
    progress.warnings += [*trainer.choices.notes, *(text for text in found if text)]
    if trainer.runtime.ranks.is_main:
        for text in filter(None, found):
            logger.warning(text)


def _tflops(trainer: Trainer, windows: list[Window]) -> float:
    """Model TFLOPs a second and device over steady windows."""
    chosen = steady(windows)
    wall_s = sum(window.wall_s for window in chosen)
    if not wall_s:
        return float("nan")
    model_flops = flops.ModelFlops.of(trainer.model.model)
    total = sum(model_flops.of_window(window) for window in chosen)
    return total / wall_s / trainer.runtime.ranks.world_size / 1e12


def _memory(runtime: Runtime) -> dict[str, Any]:
    """Peaks of this rank: of the GPU's allocator, or the process's resident size."""
    if runtime.is_cuda:
        stats = torch.cuda.memory_stats(runtime.device)
        return {
            "peak_allocated_gib": stats["allocated_bytes.all.peak"] / 2**30,
            "peak_reserved_gib": stats["reserved_bytes.all.peak"] / 2**30,
            "allocation_retries": stats["num_alloc_retries"],
        }
    import resource

    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "peak_allocated_gib": peak_gib,
        "peak_reserved_gib": peak_gib,
        "allocation_retries": 0,
    }


def versions() -> dict[str, str]:
    import accelerate
    import transformers

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "cuda": torch.version.cuda or "",
    }


def final_metrics(report: TrainReport) -> dict[str, float]:
    named = {
        "test_loss": report.test_loss,
        "test_accuracy": report.test_accuracy,
        "validation_loss": report.validation_loss,
        "validation_accuracy": report.validation_accuracy,
    }
    return {name: value for name, value in named.items() if value is not None}


@dataclass
class MetricsFile:
    """Live points, a JSON line each, written by the main rank and flushed at once."""

    path: Path
    enabled: bool = True

    def __post_init__(self) -> None:
        if self.enabled:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text("")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        if not self.enabled:
            return
        line = json.dumps({"step": step, "time_s": time.time(), "metrics": metrics})
        with self.path.open("a") as file:
            file.write(line + "\n")


class Bookkeeping:
    """The habits of slow loops (guide B), kept as a measuring stick. By default it
    does nothing: the history is a list, written once, at the end."""

    def __init__(self, job: TrainJob) -> None:
        self._settings = job.settings.train
        self._table: Any = None

    def after_step(self, trainer: Trainer, step: int, rate: float) -> None:
        settings = self._settings
        if settings.synchronize_every_step:
            loss = _read_loss(trainer)
            if settings.history == "dataframe":
                self._append(step, loss, rate)
        every = settings.empty_cache_every
        if every and (step + 1) % every == 0 and trainer.runtime.is_cuda:
            torch.cuda.empty_cache()

    def _append(self, step: int, loss: float, rate: float) -> None:
        import pandas as pd

        row = pd.DataFrame([{"step": step, "loss": loss, "learning_rate": rate}])
        self._table = row if self._table is None else pd.concat([self._table, row])
