"""Projected LSTMs that run side by side, one step of all of them at a time; and on a
CPU the rows of one LSTM, a share a thread.

What a step waits for is the step before; what depends on the inputs alone, and all
gradients of weights, are products over all steps at once. Cells and sums are fp32.

Legend: D LSTMs, T steps, B rows, I inputs, H cells, P width of the projection. Gates
stand in PyTorch's order: input, forget, cell, output.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatout.engine.machine.threads import Threads

MULTIPLE = 64
"""Of H and P on a GPU, where no tile asks whether a column is there."""
LEAST_CELLS = 24_000
"""T B H of rows that gain by a thread of their own on a CPU, measured with two layers.
Page: 2026-11-25_log-key-halves_2-cores.md."""


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


class RowsBeside(nn.LSTM):
    """An LSTM on a CPU whose rows `threads` share, where each has enough to do. Sums
    over rows have one order. Of its last states it then gives None."""

    threads: Threads

    @staticmethod
    def put_in(model: nn.Module, threads: Threads) -> None:
        """In place of `model`'s LSTMs, with their weights under their names. Those with
        dropout stay: it draws from a generator that threads would share."""
        for module in model.modules():
            if type(module) is nn.LSTM and not module.dropout:
                module.__class__ = RowsBeside
                module.threads = threads

    def forward(self, inputs: Any, hx: Any = None) -> Any:
        """As nn.LSTM's; rows of a batch that begin at zero are shared."""
        if hx is not None or not isinstance(inputs, Tensor) or inputs.dim() != 3:
            return super().forward(inputs, hx)
        given = inputs.transpose(0, 1) if self.batch_first else inputs
        steps, rows, _ = given.shape
        enough = steps * rows * self.hidden_size // LEAST_CELLS
        shares = min(self.threads.count, enough, rows)
        if shares < 2:
            return super().forward(inputs)
        weights: Any = self._flat_weights
        asked = given.requires_grad or any(own.requires_grad for own in weights)
        if asked and torch.is_grad_enabled():
            states = _RowsBeside.apply(self, shares, given, *weights)  # type: ignore[no-untyped-call]
        else:
            states = torch.cat(self.of_shares(given, shares, grad=False)[1], 1)
        return states.transpose(0, 1) if self.batch_first else states, None

    def of_shares(
        self, given: Tensor, shares: int, *, grad: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """(T, B, I) -> each share's own inputs, and its states (T, b, N)."""
        asks, parts = grad and given.requires_grad, given.tensor_split(shares, 1)
        inputs = [part.detach().requires_grad_(asks) for part in parts]
        autocast: Any = nullcontext
        if torch.is_autocast_enabled("cpu"):  # as here; kept casts would be shared
            dtype = torch.get_autocast_dtype("cpu")
            autocast = partial(torch.autocast, "cpu", dtype, cache_enabled=False)

        def states(share: Tensor) -> Tensor:
            with torch.set_grad_enabled(grad), autocast():
                return self._states(share)

        return inputs, self.threads.run(states, inputs)

    def _states(self, given: Tensor) -> Tensor:
        """(T, b, I) -> (T, b, N): what nn.LSTM calls."""
        stacks, rows = self.num_layers * (1 + self.bidirectional), given.shape[1]
        widths = self.proj_size or self.hidden_size, self.hidden_size
        begin = [given.new_zeros(stacks, rows, width) for width in widths]
        weights: Any = self._flat_weights
        of_stacks = self.bias, self.num_layers, 0.0, self.training, self.bidirectional
        return torch.lstm(given, begin, weights, *of_stacks, False)[0]


class _RowsBeside(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, lstm: RowsBeside, shares: int, given: Tensor, *weights: Tensor
    ) -> Tensor:
        ctx.lstm = lstm
        ctx.inputs, ctx.states = lstm.of_shares(given, shares, grad=True)
        return torch.cat([own.detach() for own in ctx.states], 1)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, states = ctx.inputs, ctx.states
        if states is None:
            raise RuntimeError("the graph of an LSTM goes with its backward pass")
        ctx.inputs = ctx.states = None
        needed, weights = ctx.needs_input_grad[2:], ctx.lstm._flat_weights

        def gradients(share: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
            own, found, grad = share
            asked = zip((own, *weights), needed, strict=True)
            return torch.autograd.grad(found, [one for one, is_ in asked if is_], grad)

        grads = grad.tensor_split(len(states), 1)
        shares = list(zip(inputs, states, grads, strict=True))
        each = zip(*ctx.lstm.threads.run(gradients, shares), strict=True)
        of_inputs = [torch.cat(next(each), 1)] if needed[0] else [None]
        of_weights = (reduce(add, next(each)) if is_ else None for is_ in needed[1:])
        return (None, None, *of_inputs, *of_weights)
