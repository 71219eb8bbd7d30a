"""State of a run, written to the disk and read back, without blocking the device.

A checkpoint has everything that later steps depend on: weights, optimizer, loss scale,
every rank's generators and sums, and the records. The rows of a step and its learning
rate are functions of the step's number, so no data is stored.

    model.safetensors      parameters and buffers, fp32, by the model's own names
    optimizer.safetensors  `<parameter>/<key of its state>`, such as exp_avg and step
    ranks.safetensors      `<rank>/<generator>`, and the sums since the last log point
    state.json             history, best evaluation, initial loss

If weights are sharded, each rank writes its part (shards.py), and reads the part that
it then has: no device and no host ever has a whole tensor of such a model.
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

from flatout.engine.checkpoints.checkpoint_folder import Checkpoint, CheckpointError
from flatout.engine.checkpoints.shards import (
    Offsets,
    Shapes,
    fill_own_part,
    is_any_sharded,
    load_whole,
    own_parts,
    part_name,
    read_parts,
    save_part,
    stored_shapes,
    stored_types,
)
from flatout.engine.machine.runtime import Runtime, seed_all
from flatout.engine.models.adapters import has_adapter
from flatout.engine.parameters.own_parts import is_own
from flatout.engine.train.recording.recorder import Recorder
from flatout.engine.train.setup.assemble import Trainer
from flatout.engine.train.step import StepSums

logger = logging.getLogger(__name__)

Named = dict[str, Tensor]
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
RANKS, STATE = "ranks.safetensors", "state.json"
GROUPS = "optimizer_groups"
NUMBER = "#"
"""Separator between the name of a number and its type, for example `step#int`."""
NUMBERS = {int: torch.int64, float: torch.float64}


class UnsoundStateError(ValueError):
    """The state must not be saved."""


@dataclass
class Snapshot:
    """One rank's part of a run's state, as a copy on the host."""

    model: Named
    optimizer: Named
    ranks: Named
    """Empty on all ranks except the main one, like `state`."""
    state: dict[str, Any]
    first_bad_step: Tensor
    rank: int = 0
    offsets: Offsets | None = None
    """Start of each part; None for whole tensors."""
    ready: Any = None
    """Event after the copies from the device; None if they are done."""

    def write(self, folder: Path) -> list[str]:
        """Write this rank's files of a checkpoint; return their names. Raises
        UnsoundStateError and OSError."""
        if self.ready is not None:
            self.ready.synchronize()
        self._check()
        names = []
        for name, tensors in ((MODEL, self.model), (OPTIMIZER, self.optimizer)):
            names.append(part_name(name, self.rank))
            save_part(tensors, folder / names[-1], self.offsets)
        if self.rank > 0:
            return names
        save_file(self.ranks, folder / RANKS)
        text = json.dumps(self.state, default=vars)  # dataclasses become dicts
        (folder / STATE).write_text(text, encoding="utf-8")
        return [*names, RANKS, STATE]

    def _check(self) -> None:
        if int(self.first_bad_step) < StepSums.NEVER:
            raise UnsoundStateError(f"step {int(self.first_bad_step)} was not finite")
        for name, tensor in self.model.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise UnsoundStateError(f"{name} has values that are not finite")


@dataclass
class Snapshots:
    """Copies the state of one run into host memory that is reused."""

    trainer: Trainer
    recorder: Recorder
    control: Any = None
    """Process group for host data; None with one rank."""
    _buffers: Named = field(default_factory=dict)

    def take(self) -> Snapshot | None:
        """Copy this rank's part of the state (all ranks must call it); None if it has
        no part. The device copies before the next step changes the state; the host does
        not wait."""
        trainer, ranks = self.trainer, self.trainer.runtime.ranks
        generators, sums = self._gather_generators(), _gather_sums(trainer)
        model, optimizer = saved_tensors(trainer.model), _optimizer_tensors(trainer)
        sharded = is_any_sharded(model)
        if not (ranks.is_main or sharded):
            return None
        parts = {
            kind: own_parts(tensors, is_main=ranks.is_main)
            for kind, tensors in (("model", model), ("optimizer", optimizer))
        }
        copied = {
            kind: {
                name: self._copy(f"{kind}/{name}", p.data) for name, p in own.items()
            }
            for kind, own in parts.items()
        }
        offsets = {n: p.offsets for own in parts.values() for n, p in own.items()}
        bad = self._copy("first_bad_step", trainer.stepper.sums.first_bad_step)
        shared = {**generators, "sums": self._copy("sums", sums)}
        return Snapshot(
            **copied,
            ranks=shared if ranks.is_main else {},
            state=self._state() if ranks.is_main else {},
            first_bad_step=bad,
            rank=ranks.rank,
            offsets=offsets if sharded else None,
            ready=_event(trainer.runtime),
        )

    def _state(self) -> dict[str, Any]:
        """State of the recorder, and numbers in the optimizer's groups."""
        groups = self.trainer.optimizer.param_groups
        kept = [{n: v for n, v in g.items() if type(v) in NUMBERS} for g in groups]
        return {**self.recorder.state(), GROUPS: kept}

    def _copy(self, key: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = _host_like(tensor)
        return buffer.copy_(tensor.detach(), non_blocking=True)

    def _gather_generators(self) -> Named:
        """Generators of all ranks, on the main rank."""
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


def _host_like(tensor: Tensor) -> Tensor:
    """Host tensor, page-locked for a GPU so that copies do not block."""
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    except RuntimeError:  # the host cannot lock this amount
        return torch.empty_like(tensor, device="cpu")


def _event(runtime: Runtime) -> Any:
    if not runtime.is_cuda:
        return None
    return torch.cuda.current_stream().record_event()


def named_tensors(module: nn.Module) -> Named:
    """Parameters (tied ones once), and buffers of the state dict."""
    stored = set(module.state_dict())
    buffers = {n: b for n, b in module.named_buffers() if n in stored}
    return {**dict(module.named_parameters()), **buffers}


def saved_tensors(module: nn.Module) -> Named:
    """`named_tensors`; with an adapter, without the frozen weights of the base, which
    are read from its checkpoint."""
    tensors = named_tensors(module)
    if not has_adapter(getattr(module, "model", module)):
        return tensors
    frozen = {n for n, p in module.named_parameters() if not p.requires_grad}
    return {name: tensor for name, tensor in tensors.items() if name not in frozen}


def _optimizer_tensors(trainer: Trainer) -> Named:
    """Moments and step counts by parameter; the loss scale."""
    states = trainer.optimizer.state
    found = {
        f"{name}/{key}": value
        for name, parameter in trainer.model.named_parameters()
        for key, value in states.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }
    return {**found, **_optimizer_numbers(trainer), **_scale_tensors(trainer)}


def _optimizer_numbers(trainer: Trainer) -> Named:
    """Plain numbers that a custom optimizer keeps by parameter."""
    return {
        f"{name}/{key}{NUMBER}{type(value).__name__}": torch.tensor(
            value, dtype=NUMBERS[type(value)]
        )
        for name, parameter in trainer.model.named_parameters()
        for key, value in trainer.optimizer.state.get(parameter, {}).items()
        if type(value) in NUMBERS
    }


def _put_numbers_back(trainer: Trainer) -> None:
    """Convert the tensors of `_optimizer_targets` back to plain numbers."""
    for state in trainer.optimizer.state.values():
        for key in [key for key in state if NUMBER in key]:
            name, _, _ = key.partition(NUMBER)
            state[name] = state.pop(key).item()


def _scale_tensors(trainer: Trainer) -> Named:
    scaler = trainer.stepper.scaler
    return {} if scaler is None else scaler.tensors()


def _gather_sums(trainer: Trainer) -> Tensor:
    """Sums (ranks, 3) float64 since the last log point: loss, hits, judged."""
    sums, world_size = trainer.stepper.sums, trainer.runtime.ranks.world_size
    mine = torch.stack([part.double() for part in (sums.loss, sums.hits, sums.judged)])
    if world_size == 1:
        return mine.unsqueeze(0)
    everybody = [torch.empty_like(mine) for _ in range(world_size)]
    torch.distributed.all_gather(everybody, mine)
    return torch.stack(everybody)


def generator_state(runtime: Runtime) -> Named:
    """State of PyTorch's (CPU and this rank's GPU), NumPy's and Python's generators."""
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
    """Restore the state of `checkpoint` (known to the main rank) on all ranks. Returns
    its step. Raises CheckpointError if it is of another model."""
    folder = broadcast(checkpoint and checkpoint.folder, control)
    is_main = trainer.runtime.ranks.is_main
    step = int(broadcast(checkpoint and checkpoint.manifest.step, control))
    _fill_from(folder, MODEL, saved_tensors(trainer.model), trainer, control)
    shapes = broadcast(stored_shapes(folder, OPTIMIZER) if is_main else None, control)
    # A custom optimizer may have state of any type; flatout's has its parameters'.
    is_custom = is_own(trainer.job.settings.train.optimizer)
    read = stored_types(folder, OPTIMIZER) if is_main and is_custom else {}
    targets = _optimizer_targets(trainer, shapes, broadcast(read, control))
    _fill_from(folder, OPTIMIZER, targets, trainer, control)
    _put_numbers_back(trainer)
    ranks = broadcast(dict(load_file(folder / RANKS)) if is_main else None, control)
    _restore_generators(trainer, ranks, step)
    _restore_sums(trainer, ranks["sums"])
    state = broadcast(checkpoint and _load_state(checkpoint), control)
    recorder.restore(state)
    if is_custom:
        for group, kept in zip(
            trainer.optimizer.param_groups, state[GROUPS], strict=True
        ):
            group.update(kept)
    return step


def _load_state(checkpoint: Checkpoint) -> dict[str, Any]:
    text = (checkpoint.folder / STATE).read_text(encoding="utf-8")
    # A name that becomes a path: use the manifest's, which has been checked.
    return {**json.loads(text), "best_folder": checkpoint.manifest.best}


def _fill_from(
    folder: Path, name: str, targets: Named, trainer: Trainer, control: Any
) -> None:
    """Copy the contents of the files of `name` into `targets`. Each rank reads its part
    of sharded tensors; otherwise the main rank reads and broadcasts."""
    runtime, is_main = trainer.runtime, trainer.runtime.ranks.is_main
    if is_any_sharded(named_tensors(trainer.model)):
        there = stored_shapes(folder, name) if is_main else None
        _check_shapes(targets, _wanted(there, targets, name), control)
        read_parts(folder, targets, control)
    else:
        values = load_whole(folder, name) if is_main else None
        fill_tensors(targets, _wanted(values, targets, name), runtime, control)


def _wanted(found: Any, targets: Named, name: str) -> Any:
    """All entries of a model; entries of the optimizer that are used."""
    if found is None or name == MODEL:
        return found
    return {entry: value for entry, value in found.items() if entry in targets}


def broadcast(value: Any, control: Any) -> Any:
    """Return the main rank's `value` on every rank."""
    if control is None:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0, group=control)
    return box[0]


@torch.no_grad()
def fill_tensors(
    targets: Named, values: Named | None, runtime: Runtime, control: Any
) -> None:
    """Copy `values` (of the main rank) into `targets` on every rank, in place, one at a
    time. Raises CheckpointError if names or shapes differ."""
    there = None if values is None else {n: tuple(t.shape) for n, t in values.items()}
    _check_shapes(targets, there, control)
    for name, target in targets.items():
        whole = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        if values is not None:
            whole.copy_(values[name])
        if control is not None:
            group = None if whole.is_cuda else control
            torch.distributed.broadcast(whole, src=0, group=group)
        fill_own_part(target, whole)


def _check_shapes(targets: Named, there: Shapes | None, control: Any) -> None:
    """Compare with `there`, which only the main rank has. Raises CheckpointError."""
    here = {name: tuple(tensor.shape) for name, tensor in targets.items()}
    faults = [] if there is None else _shape_faults(here, there)
    if faults := broadcast(faults, control):
        shown = "; ".join(faults[:5]) + ("; ..." if len(faults) > 5 else "")
        raise CheckpointError(f"the weights belong to another model: {shown}")


def _shape_faults(here: Shapes, there: Shapes) -> list[str]:
    return [
        f"{name}: {there.get(name, 'absent')} there, {here.get(name, 'absent')} here"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]


def _optimizer_targets(
    trainer: Trainer, shapes: Mapping[str, Any], types: Mapping[str, torch.dtype]
) -> Named:
    """Create the state that the optimizer would create at its first step, for the
    entries in a checkpoint. An entry without a type has its parameter's."""
    targets = _scale_tensors(trainer)
    parameters = dict(trainer.model.named_parameters())
    for entry, shape in shapes.items():
        name, _, key = entry.rpartition("/")
        if name in parameters:
            state = trainer.optimizer.state[parameters[name]]
            dtype = types.get(entry, parameters[name].dtype)
            state[key] = targets[entry] = _empty_state(
                trainer, parameters[name], key, tuple(shape), dtype
            )
    return targets


def _empty_state(
    trainer: Trainer,
    parameter: Tensor,
    key: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Tensor:
    if key == "step" and dtype.is_floating_point:
        resolved = trainer.resolved
        on_device = resolved.fused_optimizer or resolved.cuda_graphs
        device = parameter.device if on_device else torch.device("cpu")
        return torch.zeros((), dtype=torch.float32, device=device)
    for kind, number_type in NUMBERS.items():
        if key.endswith(f"{NUMBER}{kind.__name__}"):
            return torch.zeros((), dtype=number_type)
    if shape == () and is_own(trainer.job.settings.train.optimizer):
        return torch.zeros((), dtype=dtype)  # on the CPU, like PyTorch's
    if shape == tuple(parameter.shape):  # sharded like the parameter
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(shape, dtype=dtype, device=parameter.device)


def _restore_generators(trainer: Trainer, ranks: Named, step: int) -> None:
    """Restore this rank's generators; ranks without a state get a separate seed."""
    me = trainer.runtime.ranks.rank
    prefix = f"{me}/"
    mine = {n.removeprefix(prefix): t for n, t in ranks.items() if n.startswith(prefix)}
    if mine:
        _set_generators(mine, trainer.runtime)
        return
    seed = trainer.job.settings.runtime.seed
    seed_all(int(np.random.SeedSequence([seed, step, me]).generate_state(1)[0]))


def _restore_sums(trainer: Trainer, stored: Tensor) -> None:
    """Restore sums of `stored` (ranks, 3); for other rank counts on the main rank."""
    ranks, sums = trainer.runtime.ranks, trainer.stepper.sums
    if len(stored) == ranks.world_size:
        mine = stored[ranks.rank]
    else:
        mine = stored.sum(0) * ranks.is_main
    for target, value in zip((sums.loss, sums.hits, sums.judged), mine, strict=True):
        target.copy_(value)
