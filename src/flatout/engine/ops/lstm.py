"""Projected LSTMs that run side by side, one step of all of them at a time.

What a step waits for is the step before; what depends on the inputs alone, and all
gradients of weights, are products over all steps at once. Cells and sums are fp32.

Legend: D LSTMs, T steps, B rows, I inputs, H cells, P width of the projection. Gates
stand in PyTorch's order: input, forget, cell, output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

MULTIPLE = 64
"""Of H and P on a GPU, where no tile asks whether a column is there."""


class Weights(NamedTuple):
    """Of D LSTMs."""

    inputs: Tensor
    """(D, 4H, I)."""
    recurrent: Tensor
    """(D, 4H, P)."""
    bias: Tensor
    """(D, 4H), at least fp32."""
    projection: Tensor
    """(D, P, H)."""


def weights_of(layers: Sequence[Any], dtype: torch.dtype) -> Weights:
    """Of `nn.LSTM`s of one layer and direction, all alike; biases are summed."""

    def stacked(name: str) -> Tensor:
        return torch.stack([getattr(layer, name).to(dtype) for layer in layers])

    biases = [layer.bias_ih_l0 + layer.bias_hh_l0 for layer in layers]
    return Weights(
        stacked("weight_ih_l0"),
        stacked("weight_hh_l0"),
        torch.stack(biases),
        stacked("weight_hr_l0"),
    )


def lockstep_lstm(inputs: Tensor, weights: Weights) -> Tensor:
    """inputs (D, T, B, I) -> states (D, T, B, P) of LSTMs that begin at zero; on a GPU
    in 16 bits."""
    states: Tensor = _Lockstep.apply(inputs.contiguous(), *weights)  # type: ignore[no-untyped-call]
    return states


class _Lockstep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, *given: Tensor) -> Tensor:
        weights = Weights(*given)
        sides, steps, batch, _ = inputs.shape
        gates = torch.bmm(inputs.flatten(1, 2), weights.inputs.mT)
        gates = gates.view(sides, steps, batch, -1)
        run = _kernels().forward_steps if gates.is_cuda else forward_steps
        cells, hidden, states = run(gates, *weights[1:])
        ctx.save_for_backward(inputs, *weights, gates, cells, hidden, states)
        return states

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        inputs, w_inputs, w_recurrent, bias, w_projection, *kept = ctx.saved_tensors
        gates, cells, hidden, states = kept
        grads = grad.clone(memory_format=torch.contiguous_format)
        run = _kernels().backward_steps if gates.is_cuda else backward_steps
        grad_gates = run(grads, gates, cells, w_recurrent, w_projection)
        flat = grad_gates.flatten(1, 2)  # (D, T B, 4H)
        later, earlier = grad_gates[:, 1:].flatten(1, 2), states[:, :-1].flatten(1, 2)
        return (
            torch.bmm(flat, w_inputs).view(inputs.shape),
            torch.bmm(flat.mT, inputs.flatten(1, 2)),
            torch.bmm(later.mT, earlier),
            _sum_of_rows(flat).to(bias.dtype),
            torch.bmm(grads.flatten(1, 2).mT, hidden.flatten(1, 2)),
        )


def _kernels() -> Any:
    """Imported where a GPU build brings Triton along."""
    from flatout.engine.ops.kernels import lstm

    return lstm


def _sum_of_rows(states: Tensor) -> Tensor:
    """(D, P, N) -> (D, N)."""
    if not states.is_cuda:
        return states.sum(1)
    from flatout.engine.ops.kernels.column_sum import column_sum

    return torch.stack([column_sum(own) for own in states])


def forward_steps(
    gates: Tensor, recurrent: Tensor, bias: Tensor, projection: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """kernels/lstm.py's, in plain PyTorch."""
    sides, steps, batch, _ = gates.shape
    width, size = projection.shape[1:]
    cells = bias.new_empty((sides, steps, batch, size))
    hidden = gates.new_empty((sides, steps, batch, size))
    states = gates.new_empty((sides, steps, batch, width))
    held = bias.new_zeros((sides, batch, size))
    for step in range(steps):
        total = gates[:, step] + bias.unsqueeze(1)
        if step:
            total = total + torch.bmm(states[:, step - 1], recurrent.mT)
        i, f, g, o = total.chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        held = f * held + i * g
        gates[:, step] = torch.cat([i, f, g, o], -1)
        cells[:, step] = held
        hidden[:, step] = o * held.tanh()
        states[:, step] = torch.bmm(hidden[:, step], projection.mT)
    return cells, hidden, states


def backward_steps(
    grads: Tensor, gates: Tensor, cells: Tensor, recurrent: Tensor, projection: Tensor
) -> Tensor:
    """kernels/lstm.py's, in plain PyTorch."""
    grad_gates = torch.empty_like(gates)
    carry = torch.zeros_like(cells[:, 0])
    for step in reversed(range(gates.shape[1])):
        grad = torch.bmm(grads[:, step], projection)
        i, f, g, o = gates[:, step].chunk(4, -1)
        tangent = cells[:, step].tanh()
        before = cells[:, step - 1] if step else torch.zeros_like(tangent)
        carry = carry + grad * o * (1 - tangent**2)
        parts = [
            carry * g * i * (1 - i),
            carry * before * f * (1 - f),
            carry * i * (1 - g**2),
            grad * tangent * o * (1 - o),
        ]
        grad_gates[:, step] = torch.cat(parts, -1)
        carry = carry * f
        if step:
            grads[:, step - 1] += torch.bmm(grad_gates[:, step], recurrent)
    return grad_gates
