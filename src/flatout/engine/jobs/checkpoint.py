"""The state of a run to the disk and back, without holding up the device.

A checkpoint holds all that the next steps depend on: weights, optimizer, loss scale,
every rank's generators and sums, and what was recorded. Rows of a step and its rate
are functions of the step's number, so nothing of the data is stored.

    model.safetensors      parameters and buffers, fp32, by the model's own names
    optimizer.safetensors  `<parameter>/<exp_avg | exp_avg_sq | step>`
    ranks.safetensors      `<rank>/<generator>`, and the sums since the last log point
    state.json             history, best evaluation, initial loss
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flatout.engine.assemble import Trainer
from flatout.engine.jobs.checkpoint_folder import Checkpoint, CheckpointError
from flatout.engine.recorder import Recorder
from flatout.engine.runtime import Runtime, seed_all
from flatout.engine.step import StepSums

logger = logging.getLogger(__name__)

Named = dict[str, Tensor]
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
RANKS, STATE = "ranks.safetensors", "state.json"


class UnsoundStateError(ValueError):
    """A state that must not be saved."""


@dataclass
class Snapshot:
    """A run's state on the host, of the main rank; nothing changes it any more."""

    model: Named
    optimizer: Named
    ranks: Named
    state: dict[str, Any]
    first_bad_step: Tensor
    ready: Any = None
    """Event after the copies from the device; None where they are done."""

    def write(self, folder: Path) -> None:
        """Files of a checkpoint. Raises UnsoundStateError, and what the disk raises."""
        if self.ready is not None:
            self.ready.synchronize()
        self._check()
        save_file(self.model, folder / MODEL)
        save_file(self.optimizer, folder / OPTIMIZER)
        save_file(self.ranks, folder / RANKS)
        text = json.dumps(self.state, default=vars)  # results as their fields
        (folder / STATE).write_text(text, encoding="utf-8")

    def _check(self) -> None:
        if int(self.first_bad_step) < StepSums.NEVER:
            raise UnsoundStateError(f"step {int(self.first_bad_step)} was not finite")
        for name, tensor in self.model.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise UnsoundStateError(f"{name} holds values that are not finite")


@dataclass
class Snapshots:
    """Takes snapshots of one run into host memory that is used again and again."""

    trainer: Trainer
    recorder: Recorder
    control: Any = None
    """Process group for host data; None on one rank."""
    _buffers: Named = field(default_factory=dict)

    def take(self) -> Snapshot | None:
        """The state now, on the main rank (all ranks call it). The device copies in
        its own order, before the next step changes anything; the host goes on."""
        trainer, sums = self.trainer, self.trainer.stepper.sums
        generators = self._gather_generators()
        sources = {
            "model": named_tensors(trainer.model),
            "optimizer": _optimizer_tensors(trainer),
            "sums": {
                "sums": _gather_sums(trainer),
                "first_bad_step": sums.first_bad_step,
            },
        }
        copied = {
            part: {name: self._copy(f"{part}/{name}", t) for name, t in tensors.items()}
            for part, tensors in sources.items()
        }
        if not trainer.runtime.ranks.is_main:
            return None
        return Snapshot(
            model=copied["model"],
            optimizer=copied["optimizer"],
            ranks={**generators, "sums": copied["sums"]["sums"]},
            state=self.recorder.state(),
            first_bad_step=copied["sums"]["first_bad_step"],
            ready=_event(trainer.runtime),
        )

    def _copy(self, key: str, tensor: Tensor) -> Tensor:
        whole = whole_tensor(tensor)
        if not self.trainer.runtime.ranks.is_main:
            return whole
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = _host_like(whole)
        return buffer.copy_(whole, non_blocking=True)

    def _gather_generators(self) -> Named:
        """Of all ranks, on the main rank."""
        runtime = self.trainer.runtime
        mine, ranks = generator_state(runtime), runtime.ranks
        everybody: list[Any] = [mine]
        if self.control is not None:
            everybody = [None] * ranks.world_size if ranks.is_main else []
            torch.distributed.gather_object(
                mine, everybody if ranks.is_main else None, group=self.control
            )
        return {
            f"{rank}/{name}": tensor
            for rank, state in enumerate(everybody)
            for name, tensor in state.items()
        }


def is_sharded(tensor: Tensor) -> bool:
    """A DTensor; importing that class takes a second, which most runs need not pay."""
    return hasattr(tensor, "full_tensor")


def whole_tensor(tensor: Tensor) -> Tensor:
    """All of it, detached; a collective where it is sharded."""
    tensor = tensor.detach()
    if not is_sharded(tensor):
        return tensor
    result: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return result


def _host_like(tensor: Tensor) -> Tensor:
    """Page-locked beside a GPU, so that a copy does not wait; else plain memory."""
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    except RuntimeError:  # the host does not lock that much
        return torch.empty_like(tensor, device="cpu")


def _event(runtime: Runtime) -> Any:
    if not runtime.is_cuda:
        return None
    return torch.cuda.current_stream().record_event()


def named_tensors(module: nn.Module) -> Named:
    """Parameters (tied ones once) and the buffers that belong to the state."""
    stored = set(module.state_dict())
    buffers = {n: b for n, b in module.named_buffers() if n in stored}
    return {**dict(module.named_parameters()), **buffers}


def _optimizer_tensors(trainer: Trainer) -> Named:
    """Moments and step counts by parameter; the loss scale."""
    states = trainer.optimizer.state
    found = {
        f"{name}/{key}": value
        for name, parameter in trainer.model.named_parameters()
        for key, value in states.get(parameter, {}).items()
    }
    return {**found, **_scale_tensors(trainer)}


def _scale_tensors(trainer: Trainer) -> Named:
    scaler = trainer.stepper.scaler
    return {} if scaler is None else scaler.tensors()


def _gather_sums(trainer: Trainer) -> Tensor:
    """Loss, hits and judged since the last log point: (ranks, 3) float64."""
    sums, world_size = trainer.stepper.sums, trainer.runtime.ranks.world_size
    mine = torch.stack([part.double() for part in (sums.loss, sums.hits, sums.judged)])
    if world_size == 1:
        return mine.unsqueeze(0)
    everybody = [torch.empty_like(mine) for _ in range(world_size)]
    torch.distributed.all_gather(everybody, mine)
    return torch.stack(everybody)


def generator_state(runtime: Runtime) -> Named:
    """Of PyTorch (CPU and this rank's GPU), NumPy and Python, as tensors."""
    numpy_state: Any = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    gauss_or_nan = float("nan") if gauss is None else gauss
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(numpy_state[1].astype(np.int64)),
        "numpy_position": torch.tensor(numpy_state[2:4]),
        "numpy_gauss": torch.tensor(numpy_state[4], dtype=torch.float64),
        "python": torch.tensor([version, *internal]),
        "python_gauss": torch.tensor(gauss_or_nan, dtype=torch.float64),
    }
    if runtime.is_cuda:
        state["cuda"] = torch.cuda.get_rng_state(runtime.device)
    return state


def _set_generators(state: Named, runtime: Runtime) -> None:
    torch.set_rng_state(state["torch"])
    position, has_gauss = state["numpy_position"].tolist()
    keys = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(
        ("MT19937", keys, position, has_gauss, float(state["numpy_gauss"]))
    )
    version, *internal = state["python"].tolist()
    gauss = float(state["python_gauss"])
    random.setstate((version, tuple(internal), None if math.isnan(gauss) else gauss))
    if runtime.is_cuda and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], runtime.device)


def restore(
    checkpoint: Checkpoint | None, trainer: Trainer, recorder: Recorder, control: Any
) -> int:
    """Put the state of `checkpoint` (known to the main rank) back on all ranks.
    Returns its step. Raises CheckpointError where it is of another model."""
    folder = None if checkpoint is None else checkpoint.folder
    step = int(broadcast(checkpoint and checkpoint.manifest.step, control))
    weights = named_tensors(trainer.model)
    fill_tensors(weights, _load(folder, MODEL), trainer.runtime, control)
    _restore_optimizer(trainer, _load(folder, OPTIMIZER), control)
    ranks = broadcast(_load(folder, RANKS), control) or {}
    _restore_generators(trainer, ranks, step)
    _restore_sums(trainer, ranks["sums"])
    text = None if folder is None else (folder / STATE).read_text(encoding="utf-8")
    recorder.restore(json.loads(broadcast(text, control)))
    return step


def _load(folder: Path | None, name: str) -> Named | None:
    return None if folder is None else dict(load_file(folder / name))


def broadcast(value: Any, control: Any) -> Any:
    """The main rank's `value` on every rank."""
    if control is None:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0, group=control)
    return box[0]


@torch.no_grad()
def fill_tensors(
    targets: Mapping[str, Tensor], values: Named | None, runtime: Runtime, control: Any
) -> None:
    """Copy `values` (of the main rank) into `targets` on every rank, in place.
    Raises CheckpointError where names or shapes differ."""
    faults = None if values is None else _shape_faults(targets, values)
    if faults := broadcast(faults, control):
        shown = "; ".join(faults[:5]) + ("; ..." if len(faults) > 5 else "")
        raise CheckpointError(f"the weights are of another model: {shown}")
    for name, target in targets.items():
        whole = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        if values is not None:
            whole.copy_(values[name])
        if control is not None:
            group = None if whole.is_cuda else control
            torch.distributed.broadcast(whole, src=0, group=group)
        target.copy_(_sharded_like(target, whole) if is_sharded(target) else whole)


def _sharded_like(target: Any, whole: Tensor) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, target.device_mesh, target.placements)


def _shape_faults(targets: Mapping[str, Tensor], values: Named) -> list[str]:
    here = {name: tuple(tensor.shape) for name, tensor in targets.items()}
    there = {name: tuple(tensor.shape) for name, tensor in values.items()}
    return [
        f"{name}: {there.get(name, 'absent')} there, {here.get(name, 'absent')} here"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]


def _restore_optimizer(trainer: Trainer, values: Named | None, control: Any) -> None:
    """State that AdamW would make at its first step, then the values into it."""
    names = broadcast(None if values is None else sorted(values), control)
    on_device = trainer.choices.fused_optimizer or trainer.choices.cuda_graphs
    targets = _scale_tensors(trainer)
    parameters = dict(trainer.model.named_parameters())
    for entry in names:
        name, _, key = entry.rpartition("/")
        if name not in parameters:
            continue
        parameter = parameters[name]
        device = parameter.device if on_device else torch.device("cpu")
        trainer.optimizer.state[parameter][key] = targets[entry] = (
            torch.zeros((), dtype=torch.float32, device=device)
            if key == "step"
            else torch.zeros_like(parameter, requires_grad=False)
        )
    known = (
        None if values is None else {n: t for n, t in values.items() if n in targets}
    )
    fill_tensors(targets, known, trainer.runtime, control)


def _restore_generators(trainer: Trainer, ranks: Named, step: int) -> None:
    """Ranks that were not there get a seed of their own."""
    me = trainer.runtime.ranks.rank
    prefix = f"{me}/"
    mine = {n.removeprefix(prefix): t for n, t in ranks.items() if n.startswith(prefix)}
    if mine:
        _set_generators(mine, trainer.runtime)
        return
    seed = trainer.job.settings.runtime.seed
    seed_all(int(np.random.SeedSequence([seed, step, me]).generate_state(1)[0]))


def _restore_sums(trainer: Trainer, stored: Tensor) -> None:
    """Of `stored` (ranks, 3); from another number of ranks all go to the main rank."""
    ranks, sums = trainer.runtime.ranks, trainer.stepper.sums
    if len(stored) == ranks.world_size:
        mine = stored[ranks.rank]
    else:
        mine = stored.sum(0) * ranks.is_main
    for target, value in zip((sums.loss, sums.hits, sums.judged), mine, strict=True):
        target.copy_(value)
