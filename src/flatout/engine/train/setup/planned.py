"""Facts about a training before it begins: its steps, and the choices of the run that
it resumes."""

from __future__ import annotations

from typing import Any

from flatout.engine.checkpoints.checkpoint_folder import Manifest
from flatout.engine.checkpoints.resume import find_checkpoint
from flatout.engine.machine.runtime import Runtime
from flatout.engine.models.compilation import distinct_parts
from flatout.engine.models.flops import ModelFlops
from flatout.engine.train.setup.acceleration import Planned
from flatout.engine.train.setup.compile_choice import Choice
from flatout.engine.train.setup.job import TrainJob
from flatout.engine.train.setup.resolved_config import ResolvedConfig


def plan(job: TrainJob, runtime: Runtime, model: Any) -> Planned:
    """Plan a training of a Hugging Face `model`."""
    checkpoint = find_checkpoint(job.settings.train.resume, job.work_folder)
    found = checkpoint.manifest if checkpoint else None
    earlier = _earlier_choice(found, runtime)
    done = found.step if found and earlier is None else 0
    return Planned(
        steps=max(1, job.total_steps - done),
        parts=distinct_parts(model),
        sample_flops=_sample_flops(job, model) if runtime.is_cuda else 0,
        earlier=earlier,
        token_budget=found.accelerated.get("token_budget")
        if found and earlier
        else None,
    )


def _sample_flops(job: TrainJob, model: Any) -> int:
    """FLOPs of one sample, forward and backward; 0 for token rows."""
    if job.settings.train.rows == "tokens":
        return 0
    return ModelFlops.of(model).over(tokens=1, targets=1, attention_pairs=0)


def checkpoint_values(resolved: ResolvedConfig, runtime: Runtime) -> dict[str, Any]:
    """Values for a checkpoint, so that a resumed run makes the same choices."""
    return {
        "compile": resolved.compile,
        "cuda_graphs": resolved.cuda_graphs,
        "token_budget": resolved.token_budget,
        "reason": resolved.compile_reason,
        **_device_facts(runtime),
    }


def _earlier_choice(found: Manifest | None, runtime: Runtime) -> Choice | None:
    """Earlier choice; None for another device or number of them, which choose again."""
    kept = found.accelerated if found else {}
    if not kept or any(kept.get(k) != v for k, v in _device_facts(runtime).items()):
        return None
    return Choice(kept["compile"], kept["cuda_graphs"], kept["reason"])


def _device_facts(runtime: Runtime) -> dict[str, Any]:
    return {"device": runtime.device_name, "world_size": runtime.ranks.world_size}
