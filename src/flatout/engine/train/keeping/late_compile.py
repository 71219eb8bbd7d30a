"""Steps that begin uncompiled, and are compiled from a later one on.

Meanwhile another process compiles: PyTorch keeps its graphs in a folder, where this one
finds them. Which step is the first compiled one is noted before it runs, so that a run
that is killed goes on bit for bit.
"""

from __future__ import annotations

import logging
import pickle
from dataclasses import replace

import torch
from torch.nn.parallel import DistributedDataParallel

from flatout.engine.models.compilation import compiled
from flatout.engine.train.keeping.compile_process import CompileProcess
from flatout.engine.train.setup.assemble import Trainer, fuse_parts

logger = logging.getLogger(__name__)


class LateCompile:
    """Of one run on this rank; nothing where the run is not a late one."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def begin(self, start: int, step: int | None) -> None:
        """The run goes on at step `start`. `step`: the first compiled one, where a run
        before this one knew it; else a process of each machine begins to compile."""
        if not self._trainer.resolved.late:
            return
        if step is not None:
            self._set(step)
            if step < start:  # evaluated as such, even where no step is left
                compile_steps(self._trainer)
        elif self._trainer.runtime.ranks.local_rank == 0:
            self._trainer.beside = _started(self._trainer)

    @property
    def is_open(self) -> bool:
        """The first compiled step is to be found."""
        resolved = self._trainer.resolved
        return resolved.late and resolved.compiled_from_step is None

    @property
    def is_compiling(self) -> bool:
        beside = self._trainer.beside
        return beside is not None and beside.is_running()

    def announce(self, step: int) -> None:
        """Nobody compiles any more: from `step` on, which has not run, steps are
        compiled."""
        self._set(step)
        told = self._trainer.beside.told() if self._trainer.beside else ""
        self.stop()
        if self._trainer.runtime.ranks.is_main:
            logger.info("steps are compiled from step %d on%s", step + 1, told)

    def switch_at(self, step: int) -> bool:
        """Before `step` runs; whether it is the first one that is compiled."""
        resolved = self._trainer.resolved
        first = resolved.compiled_from_step
        if not resolved.late or resolved.compile or first is None or step < first:
            return False
        compile_steps(self._trainer)
        return True

    def stop(self) -> None:
        if self._trainer.beside is not None:
            self._trainer.beside.stop()
            self._trainer.beside = None

    def _set(self, step: int) -> None:
        resolved = self._trainer.resolved
        self._trainer.resolved = replace(resolved, compiled_from_step=step)


def _started(trainer: Trainer) -> CompileProcess | None:
    """None where it cannot be: without memory, or room for what it is told."""
    try:
        return CompileProcess.start(trainer)
    except (OSError, pickle.PicklingError, AttributeError, TypeError) as error:
        logger.warning(
            "no process compiles beside the training (%s): the training itself "
            "compiles, from one of its first steps on",
            error,
        )
        return None


def compile_steps(trainer: Trainer) -> None:
    """Steps from here on are compiled: the same parameters, and optimizer."""
    model, stepper, runtime = trainer.model, trainer.stepper, trainer.runtime
    runtime.synchronize()  # what was recorded may still run
    trainer.resolved = replace(trainer.resolved, compile=True)
    train = trainer.job.settings.train
    noise = fuse_parts(model, train, trainer.resolved, runtime)
    fast, module = compiled(model), stepper.module
    if fast is not model and isinstance(module, DistributedDataParallel):
        module.module = fast
    elif fast is not model:
        module = fast
    stepper.go_on_with(module, noise)
    if runtime.is_cuda:
        torch.cuda.empty_cache()  # uncompiled steps hold other sizes
