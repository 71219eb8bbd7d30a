"""Write the state of a run to disk without blocking the device, and read it back.

A checkpoint contains everything on which later steps depend: weights, optimizer state,
loss scale, the random states and sums of all ranks, and the recorder's state. It
contains no data, because the rows and the learning rate of a step depend only on its
number.

    model.safetensors      parameters and buffers, fp32, by the model's own names
    optimizer.safetensors  `<parameter>/<state key>`, for keys such as exp_avg and step
    ranks.safetensors      `<rank>/<generator>`, and sums since the last logging step
    state.json             history, best evaluation, initial loss, and Python numbers in
                           the state of a custom optimizer

The main rank writes and reads these files. Sharded tensors are gathered one by one.
"""

from __future__ import annotations

import json
import logging
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flatout.engine.checkpoints.checkpoint_folder import Checkpoint, CheckpointError
from flatout.engine.checkpoints.resume import differing
from flatout.engine.checkpoints.shards import fill_own_part, load_whole, whole_tensor
from flatout.engine.machine.runtime import Runtime, seed_all
from flatout.engine.models.adapters import has_adapter
from flatout.engine.parameters.own_parts import is_own
from flatout.engine.train.process_group import all_gather, broadcast
from flatout.engine.train.recording.recorder import Recorder
from flatout.engine.train.setup.assemble import Trainer
from flatout.engine.train.step import StepSums

logger = logging.getLogger(__name__)

Named = dict[str, Tensor]
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
RANKS, STATE = "ranks.safetensors", "state.json"
GROUPS, NUMBERS = "optimizer_groups", "optimizer_numbers"


class UnsoundStateError(ValueError):
    """Raised if the state must not be saved because values are not finite."""


@dataclass
class Snapshot:
    """A copy of a run's state in the host memory of the main rank."""

    files: dict[str, Named]
    """The tensors of the files MODEL, OPTIMIZER and RANKS, by file and tensor name."""
    state: dict[str, Any]
    first_bad_step: Tensor
    ready: Any = None
    """The CUDA event recorded after the copies to the host, or None without a GPU."""

    def write(self, folder: Path) -> list[str]:
        """Write the files of a checkpoint to `folder` and return their names. Raises
        UnsoundStateError if values are not finite, and OSError if writing fails."""
        if self.ready is not None:
            self.ready.synchronize()
        self._check()
        for name, tensors in self.files.items():
            save_file(tensors, folder / name)
        text = json.dumps(self.state, default=vars)  # dataclasses become dicts
        (folder / STATE).write_text(text, encoding="utf-8")
        return [*self.files, STATE]

    def _check(self) -> None:
        if int(self.first_bad_step) < StepSums.NEVER:
            raise UnsoundStateError(f"step {int(self.first_bad_step)} was not finite")
        for name, tensor in self.files[MODEL].items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise UnsoundStateError(f"{name} has values that are not finite")


@dataclass
class Snapshots:
    """Copies the state of a run to host memory, into buffers that are reused."""

    trainer: Trainer
    recorder: Recorder
    control: Any = None
    """The process group for messages in host memory, or None for a single rank."""
    _buffers: Named = field(default_factory=dict)

    def take(self) -> Snapshot | None:
        """Copy the state to the host memory of the main rank. Return the copy on the
        main rank, and None on other ranks. All ranks must call this. The device
        finishes copying before the next step, but the host does not wait for it."""
        trainer = self.trainer
        shared = {**self._gather_generators(), "sums": _gather_sums(trainer)}
        files = {
            MODEL: saved_tensors(trainer.model),
            OPTIMIZER: _optimizer_tensors(trainer),
            RANKS: shared,
        }
        copied = {
            file: {n: self._copy(f"{file}/{n}", t) for n, t in tensors.items()}
            for file, tensors in files.items()
        }
        bad = self._copy("first_bad_step", trainer.stepper.sums.first_bad_step)
        if not trainer.runtime.ranks.is_main:
            return None
        on_gpu = trainer.runtime.is_cuda
        ready = torch.cuda.current_stream().record_event() if on_gpu else None
        return Snapshot(copied, self._state(), bad, ready)

    def _state(self) -> dict[str, Any]:
        """Return the recorder's state, and plain numbers in the optimizer's state."""
        optimizer = self.trainer.optimizer
        numbers = {
            name: _numbers(optimizer.state.get(parameter, {}))
            for name, parameter in self.trainer.model.named_parameters()
        }
        groups = [_numbers(group) for group in optimizer.param_groups]
        return {**self.recorder.state(), GROUPS: groups, NUMBERS: numbers}

    def _copy(self, key: str, tensor: Tensor) -> Tensor:
        whole = whole_tensor(tensor)  # a collective operation
        if not self.trainer.runtime.ranks.is_main:
            return torch.empty(0)
        if key not in self._buffers:
            self._buffers[key] = _host_like(whole)
        return self._buffers[key].copy_(whole, non_blocking=True)

    def _gather_generators(self) -> Named:
        """Return the states of the random generators of all ranks."""
        mine = generator_state(self.trainer.runtime)
        return {
            f"{rank}/{name}": tensor
            for rank, state in enumerate(all_gather(mine, self.control))
            for name, tensor in state.items()
        }


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {n: v for n, v in values.items() if type(v) in (int, float)}


def _host_like(tensor: Tensor) -> Tensor:
    """Return an uninitialised host tensor like `tensor`, pinned if that is on a GPU."""
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    except RuntimeError:  # the host cannot pin this much memory
        return torch.empty_like(tensor, device="cpu")


def named_tensors(module: nn.Module) -> Named:
    """Return the parameters and persistent buffers by name. Tied tensors occur once."""
    stored = set(module.state_dict())
    buffers = {n: b for n, b in module.named_buffers() if n in stored}
    return {**dict(module.named_parameters()), **buffers}


def saved_tensors(module: nn.Module) -> Named:
    """Return the tensors that a checkpoint stores, by name. The frozen weights of a
    model with an adapter are left out, because they are read from the base model."""
    tensors = named_tensors(module)
    if not has_adapter(getattr(module, "model", module)):
        return tensors
    frozen = {n for n, p in module.named_parameters() if not p.requires_grad}
    return {name: tensor for name, tensor in tensors.items() if name not in frozen}


def _optimizer_tensors(trainer: Trainer) -> Named:
    """Return the optimizer's moments and step counts, and the loss scale."""
    states = trainer.optimizer.state
    found = {
        f"{name}/{key}": value
        for name, parameter in trainer.model.named_parameters()
        for key, value in states.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }
    return {**found, **_scale_tensors(trainer)}


def _scale_tensors(trainer: Trainer) -> Named:
    scaler = trainer.stepper.scaler
    return {} if scaler is None else scaler.tensors()


def _gather_sums(trainer: Trainer) -> Tensor:
    """Return the sums `loss`, `hits` and `judged` of all ranks, float64 (ranks, 3)."""
    totals, world_size = trainer.stepper.sums.totals, trainer.runtime.ranks.world_size
    mine = torch.stack([total.double() for total in totals])
    if world_size == 1:
        return mine.unsqueeze(0)
    everybody = [torch.empty_like(mine) for _ in range(world_size)]
    torch.distributed.all_gather(everybody, mine)
    return torch.stack(everybody)


def generator_state(runtime: Runtime) -> Named:
    """Return the states of the random generators of PyTorch, NumPy and Python."""
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
    """Restore the state in `checkpoint`, which is None except on the main rank, on all
    ranks. Return its step. Raises CheckpointError if it belongs to another model."""
    runtime = trainer.runtime
    step = int(broadcast(checkpoint and checkpoint.manifest.step, control))
    model = saved_tensors(trainer.model)
    fill_tensors(model, _read(checkpoint, MODEL), runtime, control)
    moments = _read(checkpoint, OPTIMIZER)
    without_data = {name: tensor.to("meta") for name, tensor in (moments or {}).items()}
    targets = _optimizer_targets(trainer, broadcast(without_data, control))
    if moments is not None:
        moments = {name: t for name, t in moments.items() if name in targets}
    fill_tensors(targets, moments, runtime, control)
    ranks = broadcast(_read(checkpoint, RANKS), control)
    _restore_generators(trainer, ranks, step)
    _restore_sums(trainer, ranks["sums"])
    state = broadcast(checkpoint and _load_state(checkpoint), control)
    recorder.restore(state)
    if is_own(trainer.job.settings.train.optimizer):
        _restore_numbers(trainer, state)
    return step


def _restore_numbers(trainer: Trainer, state: dict[str, Any]) -> None:
    optimizer = trainer.optimizer
    for group, kept in zip(optimizer.param_groups, state[GROUPS], strict=True):
        group.update(kept)
    for name, parameter in trainer.model.named_parameters():
        if kept := state.get(NUMBERS, {}).get(name):
            optimizer.state[parameter].update(kept)


def _load_state(checkpoint: Checkpoint) -> dict[str, Any]:
    text = (checkpoint.folder / STATE).read_text(encoding="utf-8")
    # Build the path from the manifest's file name, which has been validated.
    return {**json.loads(text), "best_folder": checkpoint.manifest.best}


def _read(checkpoint: Checkpoint | None, name: str) -> Named | None:
    return None if checkpoint is None else load_whole(checkpoint.folder, name)


@torch.no_grad()
def fill_tensors(
    targets: Named, values: Named | None, runtime: Runtime, control: Any
) -> None:
    """Copy `values` into `targets` on all ranks, in place and one by one. `values` is
    None except on the main rank. Raises CheckpointError if names or shapes differ."""
    _check_shapes(targets, values, control)
    for name, target in targets.items():
        whole = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        if values is not None:
            whole.copy_(values[name])
        if control is not None:
            group = None if whole.is_cuda else control
            torch.distributed.broadcast(whole, src=0, group=group)
        fill_own_part(target, whole)


def _check_shapes(targets: Named, found: Named | None, control: Any) -> None:
    """Raise CheckpointError on all ranks if names or shapes differ between `targets`
    and `found`. On all ranks but the main one, `found` is None."""
    faults = differing(_shapes(targets if found is None else found), _shapes(targets))
    if faults := broadcast(faults, control):
        shown = "; ".join(faults[:5]) + ("; ..." if len(faults) > 5 else "")
        raise CheckpointError(
            f"the weights belong to another model (there -> here): {shown}"
        )


def _shapes(tensors: Named) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _optimizer_targets(trainer: Trainer, stored: Named) -> Named:
    """Create the optimizer state of the first step, with the shapes and dtypes of
    `stored`. Return its tensors by their names in a checkpoint."""
    targets = _scale_tensors(trainer)
    parameters = dict(trainer.model.named_parameters())
    for entry, like in stored.items():
        name, _, key = entry.rpartition("/")
        if name in parameters:
            state = trainer.optimizer.state[parameters[name]]
            state[key] = _empty_state(trainer, parameters[name], key, like)
            targets[entry] = state[key]
    return targets


def _empty_state(trainer: Trainer, parameter: Tensor, key: str, like: Tensor) -> Tensor:
    if like.shape == parameter.shape and key != "step":  # sharded like the parameter
        return torch.zeros_like(parameter, dtype=like.dtype, requires_grad=False)
    resolved, device = trainer.resolved, parameter.device
    counts_on_device = resolved.fused_optimizer or resolved.cuda_graphs
    if not like.dim() and not counts_on_device:  # PyTorch keeps step counts on the CPU
        device = torch.device("cpu")
    return torch.zeros_like(like, device=device)


def _restore_generators(trainer: Trainer, ranks: Named, step: int) -> None:
    """Restore this rank's random states. If the checkpoint has none for this rank, seed
    them from the run's seed, the step and the rank."""
    me = trainer.runtime.ranks.rank
    prefix = f"{me}/"
    mine = {n.removeprefix(prefix): t for n, t in ranks.items() if n.startswith(prefix)}
    if mine:
        _set_generators(mine, trainer.runtime)
        return
    seed = trainer.job.settings.runtime.seed
    seed_all(int(np.random.SeedSequence([seed, step, me]).generate_state(1)[0]))


def _restore_sums(trainer: Trainer, stored: Tensor) -> None:
    """Restore the sums from `stored` (ranks, 3). If the number of ranks has changed,
    the main rank receives the total."""
    ranks, totals = trainer.runtime.ranks, trainer.stepper.sums.totals
    same = len(stored) == ranks.world_size
    mine = stored[ranks.rank] if same else stored.sum(0) * ranks.is_main
    for target, value in zip(totals, mine, strict=True):
        target.copy_(value)
