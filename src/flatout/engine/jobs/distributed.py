"""Ranks that train together: the process group, wrapping, and what all agree on."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from flatout.engine.compiling import block_names, compile_blocks
from flatout.engine.environment import Ranks
from flatout.engine.model import TaskModel
from flatout.engine.runtime import Runtime
from flatout.engine.settings import DistributedSettings, SettingsError

logger = logging.getLogger(__name__)

AGREE_EVERY_S = 1.0
MOST_STEPS_APART = 256


@dataclass(frozen=True)
class Team:
    """The process group of this rank, made by Accelerate, and a second one between
    the hosts: a word there costs the devices nothing."""

    accelerator: Any
    settings: DistributedSettings
    control: Any

    @classmethod
    def join(cls, settings: DistributedSettings, runtime: Runtime) -> Team:
        """Meet the other ranks: NCCL between GPUs, gloo between CPUs."""
        from accelerate import Accelerator
        from accelerate.utils import (
            DistributedDataParallelKwargs,
            InitProcessGroupKwargs,
        )

        timeout = timedelta(seconds=settings.timeout_s)
        size = settings.bucket_mib
        buckets = {} if size == "all" else {"bucket_cap_mb": size}  # all: without DDP
        # A static graph is refused by DDP where gradients are accumulated (no_sync).
        ddp = DistributedDataParallelKwargs(
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            **buckets,
        )
        accelerator = Accelerator(
            cpu=not runtime.is_cuda,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout), ddp],
        )
        control = torch.distributed.new_group(backend="gloo", timeout=timeout)
        return cls(accelerator, settings, control)

    def wrap(self, model: TaskModel, compiled: Callable[..., Any] | None) -> nn.Module:
        """`model` for all ranks together; `compiled` compiles a module."""
        if self.settings.strategy == "fsdp":
            return self._shard(model, compiled)
        module = compiled(model) if compiled else model
        with warnings.catch_warnings():
            # Its new name is not in all supported versions of PyTorch.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
            wrapped: nn.Module = self.accelerator.prepare_model(module)
        return wrapped

    def _shard(
        self, model: TaskModel, compiled: Callable[..., Any] | None
    ) -> nn.Module:
        """FSDP2: every rank keeps a part of each block's weights and of its state."""
        from accelerate import FullyShardedDataParallelPlugin
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model
        from torch.distributed.fsdp import register_fsdp_forward_method

        self._check_weights(model)
        if compiled:
            compile_blocks(model)
        # Accelerate keeps the plugin to itself where there is no GPU, and its own
        # `prepare` insists on wrapping the optimizer.
        self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=sorted(block_names(model)),
            cpu_ram_efficient_loading=False,
        )
        wrapped: nn.Module = fsdp2_prepare_model(self.accelerator, model)
        register_fsdp_forward_method(wrapped, "logits")  # evaluation calls it
        return wrapped

    def _check_weights(self, model: nn.Module) -> None:
        """Each rank keeps a part of its own model: all must have built the same."""
        total = sum(float(p.detach().double().sum()) for p in model.parameters())
        self.check_equal({"sum of the weights": total})

    def leave(self) -> None:
        """After the last word to the others."""
        self.accelerator.end_training()

    def everybodys(self, value: Any) -> list[Any]:
        """`value` of each rank, in their order."""
        found: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(found, value, group=self.control)
        return found

    def check_equal(self, facts: Mapping[str, Any]) -> None:
        """Raises SettingsError that names the rank and what differs there."""
        everybodys = self.everybodys(dict(facts))
        for rank, other in enumerate(everybodys):
            if differences := differing(everybodys[0], other):
                raise SettingsError(
                    f"rank {rank} would train something else than rank 0 (there -> "
                    f"here): {'; '.join(differences)}. Give all machines the same "
                    "parameters and the same token rows"
                )


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`train.epochs: 3 -> 4`, one text a name whose values differ."""
    names = sorted({*before, *now})
    return [
        f"{name}: {before.get(name, 'absent')!r} -> {now.get(name, 'absent')!r}"
        for name in names
        if before.get(name) != now.get(name)
    ]


@dataclass(frozen=True)
class Decision:
    """What all ranks do after a step."""

    stop: int
    """Signal to leave with; 0: none."""
    save: bool


@dataclass
class Agreement:
    """Brings signals and due checkpoints of single ranks to all, at the same step.

    Hosts meet about once a second and where a checkpoint may be due, in one small
    message; the main rank says how many steps are between.
    """

    ranks: Ranks
    control: Any
    every_steps: int | None
    _next: int = 0
    _last: tuple[int, float] = field(default=(0, 0.0))

    def is_due(self, done: int) -> bool:
        if self.control is None or done >= self._next:
            return True
        return self.every_steps is not None and done % self.every_steps == 0

    def reach(self, done: int, stop: int, save: bool) -> Decision:
        """Called by all ranks at the same step; `save` counts on the main rank."""
        if self.control is None:
            return Decision(stop, save)
        apart = self._steps_apart(done) if self.ranks.is_main else 0
        word = torch.tensor([stop, int(save and self.ranks.is_main), apart])
        torch.distributed.all_reduce(
            word, op=torch.distributed.ReduceOp.MAX, group=self.control
        )
        stop, save_now, apart = word.tolist()
        self._next = done + apart
        return Decision(stop, bool(save_now))

    def _steps_apart(self, done: int) -> int:
        last_done, last_s = self._last
        now = time.monotonic()
        self._last = (done, now)
        step_s = (now - last_s) / max(1, done - last_done) if last_s else AGREE_EVERY_S
        return max(1, min(MOST_STEPS_APART, int(AGREE_EVERY_S / max(step_s, 1e-9))))
