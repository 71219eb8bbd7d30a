"""A process that compiles a training's steps beside it: `python -m` of this module.

It reads from stdin what to train, takes a few steps forward and back, and leaves what
PyTorch compiled in PyTorch's folder. Nothing else comes of it.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from flatout.engine.machine.environment import child_environment, python_path
from flatout.engine.machine.signals import die_with_parent

logger = logging.getLogger(__name__)

STEPS = 4
"""Other sizes than the first one's may be graphs of their own."""
LONGEST_S = 1_800.0
"""Then it hangs, and the training compiles by itself."""
NICENESS = 10
"""The training's own threads come first."""
PACKAGE_FOLDER = Path(__file__).parents[4]


@dataclass
class CompileProcess:
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    begin_s: float

    @classmethod
    def start(cls, trainer: Any) -> CompileProcess:
        """For the steps of `trainer`, a rank's."""
        errors = tempfile.TemporaryFile()
        with tempfile.TemporaryFile() as order:
            pickle.dump(_order(trainer), order)
            order.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=order,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=child_environment(python_path(str(PACKAGE_FOLDER))),
            )
        logger.info("process %d compiles while steps run uncompiled", process.pid)
        return cls(process, errors, time.monotonic())

    def is_running(self) -> bool:
        if self.process.poll() is not None:
            return False
        if self.age_s < LONGEST_S:
            return True
        self.stop()
        return False

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.begin_s

    def told(self) -> str:
        """How it went, as the end of a line."""
        if self.process.returncode == 0:
            return f": another process compiled them within {self.age_s:.0f} s"
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        logger.warning(
            "the process that compiled beside the training ended with status %s (%s): "
            "this one compiles now",
            self.process.returncode,
            lines[-1] if lines else "it said nothing",
        )
        return ""

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def _order(trainer: Any) -> Any:
    """A training of one rank with what `auto` came to, and steps as large as a rank's:
    kernels are tuned at their size."""
    job, resolved = trainer.job, trainer.resolved
    train, ranks = job.settings.train, trainer.runtime.ranks.world_size
    share = -(-train.global_batch_size // ranks)
    alone = train.distributed.model_copy(update={"num_machines": 1, "num_processes": 1})
    update = {
        "compile": True,
        "cuda_graphs": resolved.cuda_graphs,  # packed totals are rounded up by it
        "batching": resolved.strategy,
        "token_budget": resolved.token_budget,
        "global_batch_size": share,
        "distributed": alone,
        "resume": "never",
    }
    if job.settings.train.rows != "tokens":
        del update["batching"]
    settings = job.settings.model_copy(
        update={"train": train.model_copy(update=update)}
    )
    return replace(job, settings=settings)


def main() -> None:
    die_with_parent()
    os.nice(NICENESS)
    job = pickle.load(sys.stdin.buffer)  # noqa: S301 - the training's own
    from flatout.engine.machine.runtime import set_up
    from flatout.engine.train.setup.assemble import assemble

    runtime = set_up(job.settings.runtime)
    trainer = assemble(job, runtime)
    trainer.model.train()
    for step in range(STEPS):
        batch = trainer.data.made(step).to(runtime.device)
        trainer.stepper.set_scalars(batch)
        trainer.stepper.backward(batch)
    runtime.synchronize()


if __name__ == "__main__":
    main()
