"""Create the optimizer, compute the learning rate of each step, and clip gradients
without synchronising the device."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatout.engine.parameters import SettingsError, TrainSettings
from flatout.engine.parameters.own_parts import is_own, own_part

NO_DECAY_DIMENSIONS = 1
"""Parameters with at most this many dimensions (biases and norm weights) have no weight
decay, as in BERT and GPT-2."""
SGD_MOMENTUM = 0.9
STEPS_TRIED = 1_000
"""The maximum number of steps for which a custom schedule is tested before training."""

Groups = list[dict[str, Any]]


def build_optimizer(
    model: nn.Module, settings: TrainSettings, *, fused: bool, capturable: bool
) -> torch.optim.Optimizer:
    """Create the optimizer set in `train.optimizer`. Only matrices have weight decay.
    `fused` and `capturable` are passed to AdamW. Raises SettingsError if a custom
    optimizer cannot be created."""
    groups = parameter_groups(model, settings, capturable=capturable)
    lr = settings.peak_learning_rate
    if settings.optimizer == "sgd":
        momentum = SGD_MOMENTUM if settings.momentum is None else settings.momentum
        return torch.optim.SGD(groups, lr=lr, momentum=momentum)
    if is_own(settings.optimizer):
        return _own_optimizer(groups, settings)
    if settings.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=lr)
    return torch.optim.AdamW(
        groups,
        lr=lr,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        fused=fused,
        capturable=capturable,
    )


def _own_optimizer(groups: Groups, settings: TrainSettings) -> torch.optim.Optimizer:
    """Create the custom optimizer set in `train.optimizer`. Raises SettingsError if its
    constructor fails, its `step` needs an argument, or it has no learning rate."""
    path, options = settings.optimizer, settings.optimizer_options
    make = own_part(path, "train.optimizer")
    try:
        made: torch.optim.Optimizer = make(
            groups, lr=settings.peak_learning_rate, **options
        )
        inspect.signature(made.step).bind()
        if not all("lr" in group for group in made.param_groups):
            raise ValueError("its param_groups have no lr, which flatout sets")
    except Exception as error:
        raise SettingsError(
            f"train.optimizer: {path} cannot optimise the model's parameters in "
            f"{len(groups)} groups ({error}): check train.optimizer_options, or name "
            "another optimizer, whose step needs no closure"
        ) from error
    return made


def parameter_groups(
    model: nn.Module, settings: TrainSettings, *, capturable: bool
) -> Groups:
    """Return the trainable parameters in two groups, with and without weight decay. If
    `capturable` is true, learning rates are tensors on the device."""
    found: dict[bool, dict[str, Any]] = {}
    lr = settings.peak_learning_rate
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = parameter.dim() > NO_DECAY_DIMENSIONS
        group = found.setdefault(
            is_matrix,
            {
                "params": [],
                "weight_decay": settings.weight_decay if is_matrix else 0.0,
                # CUDA graphs read the learning rate from the device.
                "lr": torch.tensor(lr, device=parameter.device) if capturable else lr,
            },
        )
        group["params"].append(parameter)
    return list(found.values())


def learning_rate(settings: TrainSettings, step: int, total_steps: int) -> float:
    """Return the learning rate of `step`, counted from 0. It rises linearly in the
    warm-up, then follows the schedule down to `min_learning_rate_share` times the
    peak."""
    if is_own(settings.schedule):
        return settings.peak_learning_rate * own_share(settings, step, total_steps)
    warmup = math.ceil(settings.warmup_fraction * total_steps)
    if step < warmup:
        return settings.peak_learning_rate * (step + 1) / warmup
    least = settings.min_learning_rate_share
    share = _share(settings, step, warmup, total_steps)
    return settings.peak_learning_rate * (least + (1 - least) * share)


def own_share(settings: TrainSettings, step: int, total_steps: int) -> float:
    """Return the value of a custom `train.schedule` at `step`, as a fraction of the
    peak learning rate. Raises SettingsError if the schedule fails or its value is
    invalid."""
    path = settings.schedule
    try:
        share = own_part(path, "train.schedule")(step, total_steps)
    except Exception as error:
        raise SettingsError(
            f"train.schedule: {path}({step}, {total_steps}) fails: "
            f"{type(error).__name__}: {error}"
        ) from error
    try:
        found = float(share)
    except (TypeError, ValueError):
        found = math.nan
    if not 0 <= found < math.inf:
        raise SettingsError(
            f"train.schedule: {path}({step}, {total_steps}) gives {share!r}: it must "
            "be a share of train.learning_rate, a number of at least 0"
        )
    return found


def check_schedule(settings: TrainSettings, total_steps: int) -> None:
    """Call a custom schedule for steps throughout the run. Raises SettingsError if it
    fails or returns an invalid value."""
    if is_own(settings.schedule):
        every = max(1, -(-total_steps // STEPS_TRIED))
        for step in sorted({*range(0, total_steps, every), total_steps - 1}):
            own_share(settings, step, total_steps)


def _share(settings: TrainSettings, step: int, warmup: int, total_steps: int) -> float:
    """Return the factor of a built-in schedule after the warm-up: 1 at the peak,
    falling to 0 at `total_steps` unless the schedule is constant."""
    done = (step - warmup) / max(1, total_steps - warmup)
    if settings.schedule == "constant":
        return 1.0
    if settings.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    if settings.schedule == "wsd":
        decay = max(1, math.ceil(settings.decay_fraction * total_steps))
        return min(1.0, (total_steps - step) / decay)
    return 1 - done


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


@dataclass(eq=False)
class Updater:
    """Clips gradients and updates the parameters, unless a gradient or the loss is not
    finite. With fused optimizers, the kernels read this condition on the device, so the
    host does not have to wait."""

    optimizer: torch.optim.Optimizer
    max_norm: float | None
    fused: bool

    def __post_init__(self) -> None:
        groups = self.optimizer.param_groups
        self.parameters = [p for group in groups for p in group["params"]]

    def __call__(
        self, loss: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run one update. Return the gradient norm before clipping, and whether it and
        the loss are finite, as scalar tensors. `scale` is the loss scale for fp16."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        if hasattr(norm, "full_tensor"):  # the model is sharded over the ranks
            norm = norm.full_tensor()
        if scale is not None:
            norm = norm / scale
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        grad_scale = self._clip_grad_norm_divisor(norm, scale)
        if self.fused:
            # The fused kernel applies these (torch.amp.GradScaler uses them too), so
            # clipping needs no separate pass over the gradients.
            self.optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
            self.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
            self.optimizer.step()
        elif bool(finite):
            torch._foreach_div_(gradients, grad_scale)
            self.optimizer.step()
        return norm, finite

    def _clip_grad_norm_divisor(self, norm: Tensor, scale: Tensor | None) -> Tensor:
        """Return the number by which gradients are divided. It combines the loss scale
        with the clipping of `torch.nn.utils.clip_grad_norm_`."""
        grad_scale = torch.ones_like(norm)
        if self.max_norm is not None:
            grad_scale = ((norm + 1e-6) / self.max_norm).clamp(min=1.0)
        return grad_scale if scale is None else grad_scale * scale
