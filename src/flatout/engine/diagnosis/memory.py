"""Whether memory and disk will do."""

from __future__ import annotations

from typing import Any

from flatout.engine.diagnosis.finding import Finding
from flatout.engine.diagnosis.machine import LEAST_FREE_BYTES, gib
from flatout.engine.models.memory import Estimate, count_parameters

CHECKPOINT_BYTES = 12
"""A weight: itself and the two moments."""


def disk_bytes(config: Any, task: str, keep: int) -> int:
    """`keep` checkpoints, one being written, the best and the last model; twice each,
    as the catalog has copies. At least a GiB."""
    parameters = count_parameters(config, task)
    needed = parameters * (CHECKPOINT_BYTES * (keep + 1) + 4 * 4)
    return max(LEAST_FREE_BYTES, needed)


def judge(found: Estimate, available: int, where: str) -> Finding:
    """`available` bytes on `where`: a GPU's name, or RAM."""
    text = (
        f"about {gib(found.total)} of {gib(available)} ({where}): "
        f"{found.parameters / 1e6:.1f} M weights with gradients and Adam "
        f"{gib(found.states)}, {found.tokens} tokens at once {gib(found.activations)}"
    )
    if found.states > available:
        fix = "train.distributed.strategy: fsdp on several GPUs, or a smaller model"
        return Finding("training memory", "fail", text, fix)
    if found.total > available:
        fix = (
            "lower train.token_budget (kedro run --pipelines=benchmark finds the "
            "largest that fits), or set train.gradient_checkpointing: true"
        )
        return Finding("training memory", "warn", text, fix)
    return Finding("training memory", "ok", text)
