"""Maximum size of a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flatout.engine.families import family_of
from flatout.engine.machine.runtime import Runtime
from flatout.engine.parameters import SettingsError
from flatout.engine.train.setup.job import TrainJob

CPU_TOKEN_BUDGET = 8_192
GPU_TOKEN_BUDGET = 65_536
GPU_OVERHEAD_TOKENS = 4_096
CPU_SAMPLE_VALUES = 2**22
GPU_SAMPLE_VALUES = 2**27
"""Values of a micro-batch with samples of one shape: 891 RGB images of 224 x 224."""


def needs_whole_steps(config: Any) -> bool:
    """Return whether BatchNorm needs all samples of a step in one micro-batch."""
    return family_of(config).samples.batch_statistics


def _whole_step_samples(job: TrainJob, runtime: Runtime) -> int:
    """Samples of a rank's step, which BatchNorm needs in one micro-batch. Raises
    SettingsError if a step would have several, or if ranks could not share
    statistics."""
    train, world = job.settings.train, runtime.ranks.world_size
    share = -(-train.global_batch_size // world)
    if train.token_budget != "auto" and train.token_budget < share:
        raise SettingsError(
            f"train.token_budget={train.token_budget}: this model has BatchNorm, so a "
            f"step is one micro-batch, of {share} samples on each rank; set it to "
            "auto, or use a model with LayerNorm (vit, convnext)"
        )
    if world > 1 and not (runtime.is_cuda and train.global_batch_size >= world):
        raise SettingsError(
            "this model has BatchNorm, whose statistics ranks share only on GPUs, "
            "with a sample on each: set train.distributed.num_processes: 1, or use "
            "a model with LayerNorm (vit, convnext)"
        )
    return share


def token_budget(job: TrainJob, runtime: Runtime, strategy: str, config: Any) -> int:
    """Tokens, or samples of one shape, per micro-batch. Raises SettingsError."""
    train, longest = job.settings.train, job.train.facts.longest
    if family_of(config).samples.batch_statistics:
        return _whole_step_samples(job, runtime)
    if strategy == "fixed":
        longest = job.settings.max_length
    if train.token_budget != "auto":
        if train.token_budget < longest:
            raise SettingsError(
                f"train.token_budget={train.token_budget} is smaller than the longest "
                f"row ({longest} tokens): set it to at least {longest}"
            )
        return train.token_budget
    if shape := getattr(job.train.facts, "shape", None):
        return samples_at_once(shape, runtime.is_cuda)
    return max(default_token_budget(runtime.is_cuda), longest)


def samples_at_once(shape: Sequence[int], is_cuda: bool) -> int:
    """Maximum samples per micro-batch, for samples of this shape."""
    values = GPU_SAMPLE_VALUES if is_cuda else CPU_SAMPLE_VALUES
    return max(1, values // max(1, math.prod(shape)))


def default_token_budget(is_cuda: bool) -> int:
    """Token budget if the memory demand of the model is unknown."""
    return GPU_TOKEN_BUDGET if is_cuda else CPU_TOKEN_BUDGET


def overhead_tokens(config: Any, is_cuda: bool) -> int:
    """Cost of one more micro-batch on the device, in tokens."""
    if is_cuda:
        return GPU_OVERHEAD_TOKENS
    return family_of(config).cpu_overhead_tokens(config)


def rank_tokens(job: TrainJob, runtime: Runtime) -> float:
    """Mean number of tokens of a rank's share of a global batch."""
    rows = job.settings.train.global_batch_size / runtime.ranks.world_size
    return rows * job.train.facts.mean_length
