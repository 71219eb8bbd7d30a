"""AdamW, the learning rate of a step, and clipping that never asks the host."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from flatout.engine.settings import TrainSettings

NO_DECAY_DIMENSIONS = 1
"""Biases and norm weights have one dimension and do not decay (BERT, GPT-2)."""


def build_adamw(
    model: nn.Module, settings: TrainSettings, *, fused: bool, capturable: bool
) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019) with decay on matrices only."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.dim() > NO_DECAY_DIMENSIONS]
    vectors = [p for p in parameters if p.dim() <= NO_DECAY_DIMENSIONS]
    device = parameters[0].device
    rate: Any = settings.learning_rate
    if capturable:  # a CUDA graph reads it from the device
        rate = torch.tensor(rate, dtype=torch.float32, device=device)
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        fused=fused,
        capturable=capturable,
    )


def learning_rate(settings: TrainSettings, step: int, total_steps: int) -> float:
    """Rate of `step` (from 0): linear warm-up, then the schedule; a pure function."""
    warmup = math.ceil(settings.warmup_fraction * total_steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    if settings.schedule == "constant":
        return settings.learning_rate
    done = (step - warmup) / max(1, total_steps - warmup)
    if settings.schedule == "cosine":
        return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
    return settings.learning_rate * (1 - done)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class Updater:
    """Clip and step. A step whose gradient or loss is not finite changes nothing:
    the fused kernel reads that from the device, so nobody waits for it."""

    def __init__(
        self, optimizer: torch.optim.AdamW, max_norm: float | None, *, fused: bool
    ) -> None:
        self.optimizer = optimizer
        self.max_norm = max_norm
        self.fused = fused
        self.parameters = [p for g in optimizer.param_groups for p in g["params"]]

    def __call__(
        self, loss: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Gradient norm before clipping (), and whether it was finite () bool."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        if hasattr(norm, "full_tensor"):  # of a sharded model: a part on each rank
            norm = norm.full_tensor()
        if scale is not None:
            norm = norm / scale
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        if self.fused:
            self._fused_step(norm, finite, scale)
        elif bool(finite):
            self._plain_step(gradients, norm)
        return norm, finite

    def _divisor(self, norm: Tensor) -> Tensor:
        """What gradients are divided by: PyTorch's clip coefficient, turned over."""
        if self.max_norm is None:
            return torch.ones_like(norm)
        return ((norm + 1e-6) / self.max_norm).clamp(min=1.0)

    def _fused_step(self, norm: Tensor, finite: Tensor, scale: Tensor | None) -> None:
        divisor = self._divisor(norm)
        # The kernel's own places for it (torch.amp.GradScaler uses them too): clipping
        # costs no pass over the gradients.
        self.optimizer.grad_scale = (  # type: ignore[attr-defined]
            divisor if scale is None else divisor * scale
        )
        self.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        self.optimizer.step()

    def _plain_step(self, gradients: list[Tensor], norm: Tensor) -> None:
        torch._foreach_div_(gradients, self._divisor(norm))
        self.optimizer.step()
