"""Distributed training: process groups, model wrapping and equal decisions on all
ranks."""

from __future__ import annotations

import logging
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from flatout.engine.checkpoints.resume import differing
from flatout.engine.machine.environment import Ranks
from flatout.engine.machine.runtime import Runtime
from flatout.engine.models.compilation import blocks, compile_blocks, compiled
from flatout.engine.models.model import TaskModel
from flatout.engine.parameters import DistributedSettings, SettingsError

logger = logging.getLogger(__name__)

AGREE_EVERY_S = 1.0
MAX_SYNC_INTERVAL = 256


@dataclass(frozen=True)
class ProcessGroup:
    """The process group of all ranks, created by Accelerate. `control` is a second
    group, which exchanges messages in host memory."""

    accelerator: Any
    settings: DistributedSettings
    control: Any
    compute_dtype: torch.dtype = torch.float32

    @classmethod
    def join(cls, settings: DistributedSettings, runtime: Runtime) -> ProcessGroup:
        """Join the process group of all ranks, with NCCL on GPUs or gloo on CPUs.
        Raises SettingsError if Accelerate is already in use for a single rank."""
        from accelerate import Accelerator
        from accelerate.utils import (
            DistributedDataParallelKwargs,
            InitProcessGroupKwargs,
        )

        timeout = timedelta(seconds=settings.timeout_s)
        size = settings.bucket_mib
        buckets = {} if size == "all" else {"bucket_cap_mb": size}  # no DDP if "all"
        # DDP does not support static_graph with gradient accumulation (no_sync).
        ddp = DistributedDataParallelKwargs(
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            **buckets,
        )
        accelerator = Accelerator(
            cpu=not runtime.is_cuda,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout), ddp],
        )
        _check_accelerator_is_distributed(accelerator)
        control = torch.distributed.new_group(backend="gloo", timeout=timeout)
        return cls(accelerator, settings, control, runtime.compute_dtype)

    def wrap(self, model: TaskModel, compiles: bool) -> nn.Module:
        """Compile `model` if `compiles` is true, and wrap it with DDP or FSDP."""
        if self.settings.strategy == "fsdp":
            return self._shard(model, compiles)
        module = compiled(model) if compiles else model
        with warnings.catch_warnings():
            # The argument's new name is not in all supported versions of PyTorch.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
            wrapped: nn.Module = self.accelerator.prepare_model(module)
        return wrapped

    def _shard(self, model: TaskModel, compiles: bool) -> nn.Module:
        """Shard the model with FSDP2. Rank 0 broadcasts the weights block by block, so
        that no device needs memory for the whole model."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        if compiles:
            compile_blocks(model)
        device = self.accelerator.device
        mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
        copies = not compiles and self.compute_dtype != torch.float32
        for block in _sharded_separately(model, blocks(model)):
            _spread(block, device)
            if copies and not any(isinstance(m, nn.Embedding) for m in block.modules()):
                self._shard_layer(block, mesh)
            else:
                fully_shard(block, mesh=mesh)
        _spread(model, device)
        fully_shard(model, mesh=mesh)
        for name in ("logits", "logits_in_parts"):  # methods without a backward pass
            register_fsdp_forward_method(model, name)
        return model

    def _shard_layer(self, layer: nn.Module, mesh: Any) -> None:
        """Shard an uncompiled layer so that its matrices are gathered in the compute
        dtype. In fp32, autograd would keep autocast's copies of them until the backward
        pass, half of the model's size. Compiled layers recompute them. Norms stay in
        fp32."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        vectors = [m for m in layer.modules() if _has_only_vectors(m)]
        if vectors:
            fully_shard(vectors, mesh=mesh)
        policy = MixedPrecisionPolicy(
            param_dtype=self.compute_dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        fully_shard(layer, mesh=mesh, mp_policy=policy)

    def leave(self) -> None:
        """Leave the group. No messages can be sent to other ranks afterwards."""
        self.accelerator.end_training()

    def all_gather(self, value: Any) -> list[Any]:
        """Return a list with the `value` of each rank, in rank order."""
        return all_gather(value, self.control)

    def check_equal(self, facts: Mapping[str, Any]) -> None:
        """Raise SettingsError if `facts` differ between ranks."""
        gathered = self.all_gather(dict(facts))
        for rank, other in enumerate(gathered):
            if differences := differing(gathered[0], other):
                raise SettingsError(
                    f"rank {rank} would train something else than rank 0 (there -> "
                    f"here): {'; '.join(differences)}. Give all machines the same "
                    "parameters and the same token rows"
                )


def all_gather(value: Any, control: Any) -> list[Any]:
    """Return a list with the `value` of each rank, in rank order. `control` is None if
    there is only one rank."""
    if control is None:
        return [value]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value, group=control)
    return found


def broadcast(value: Any, control: Any) -> Any:
    """Return the main rank's `value` on all ranks. `control` is None for one rank."""
    if control is None:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0, group=control)
    return box[0]


def _check_accelerator_is_distributed(accelerator: Any) -> None:
    """Raise SettingsError if Accelerate was already initialised for a single rank. It
    would not wrap the model, and each rank would silently train alone."""
    if accelerator.distributed_type == "NO":
        raise SettingsError(
            "train.distributed: this process has already used Accelerate without other "
            "ranks, so gradients would not be exchanged between ranks; start the "
            "training in a new process"
        )


def _sharded_separately(model: nn.Module, found: list[nn.Module]) -> list[nn.Module]:
    """Return the blocks that can be sharded separately, inner blocks first. A block is
    left out if one of its weights is tied to a module outside the block (e.g. BERT's
    embeddings), because tied weights must be sharded together."""

    def uses(module: nn.Module) -> Counter[int]:
        held = (p for m in module.modules() for p in m._parameters.values())
        return Counter(id(p) for p in held if p is not None)

    everywhere = uses(model)
    return [
        block
        for block in reversed(found)
        if all(everywhere[key] == count for key, count in uses(block).items())
    ]


def _has_only_vectors(module: nn.Module) -> bool:
    own = [p for p in module._parameters.values() if p is not None]
    return bool(own) and all(p.dim() == 1 for p in own)


@torch.no_grad()
def _spread(unit: nn.Module, device: torch.device) -> None:
    """Move the tensors of `unit` to `device` on all ranks, with the values of rank 0.
    Tied weights stay tied. Tensors that are already sharded are skipped."""
    # Keyed by id(). The old tensor is kept so that its id is not reused.
    placed: dict[int, tuple[Tensor, Tensor]] = {}
    for module in unit.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or hasattr(tensor, "full_tensor"):
                    continue
                if id(tensor) not in placed:
                    placed[id(tensor)] = (tensor, _placed(tensor, device))
                tensors[name] = placed[id(tensor)][1]  # type: ignore[assignment]


def _placed(tensor: Tensor, device: torch.device) -> Tensor:
    placed = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if not tensor.is_meta:
        placed.copy_(tensor)
    torch.distributed.broadcast(placed, src=0)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(placed, tensor.requires_grad)
    return placed


@dataclass
class Agreement:
    """Makes all ranks stop, or save a checkpoint, at the same step. Ranks exchange a
    small message about once per second, and when a checkpoint may be due."""

    ranks: Ranks
    control: Any
    every_steps: int | None
    _next: int = 0
    _last: tuple[int, float] = field(default=(0, 0.0))

    def is_due(self, done: int) -> bool:
        if self.control is None or done >= self._next:
            return True
        return self.every_steps is not None and done % self.every_steps == 0

    def reach(self, done: int, stop: int, save: bool) -> tuple[int, bool]:
        """Return the decision for all ranks: the number of the signal with which they
        stop (0 to continue), and whether they save a checkpoint. `stop` and `save` are
        what this rank requests. Only the main rank can request a checkpoint."""
        if self.control is None:
            return stop, save
        interval = self._sync_interval(done) if self.ranks.is_main else 0
        save = save and self.ranks.is_main
        word = torch.tensor([stop, int(save), interval])
        torch.distributed.all_reduce(
            word, op=torch.distributed.ReduceOp.MAX, group=self.control
        )
        stop, save_now, interval = word.tolist()
        self._next = done + interval
        return stop, bool(save_now)

    def _sync_interval(self, done: int) -> int:
        last_done, last_s = self._last
        now = time.monotonic()
        self._last = (done, now)
        step_s = (now - last_s) / max(1, done - last_done) if last_s else AGREE_EVERY_S
        return max(1, min(MAX_SYNC_INTERVAL, int(AGREE_EVERY_S / max(step_s, 1e-9))))
