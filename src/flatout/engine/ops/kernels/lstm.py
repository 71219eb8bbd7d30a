"""Steps of projected LSTMs that run side by side: two kernels a step, each way.

cuDNN runs one LSTM behind the other, and a step is several kernels there. Here a step's
product with the weights and what its gates become are one kernel, of all LSTMs at once,
and the projection is another.

Legend: D LSTMs, T steps, B rows, H cells, P width of the projection. Gates stand in
PyTorch's order: input, forget, cell, output.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.engine.ops.lstm import MULTIPLE


class Tile(NamedTuple):
    """What a program computes, and how. Measured on an H200."""

    rows: int
    columns: int
    inner: int
    """Of a product, at a time."""
    splits: int
    """Programs that share a tile's product; a power of two."""
    warps: int
    stages: int


GATES = Tile(128, 32, 64, 1, 8, 3)
PROJECTION = Tile(64, 32, 128, 2, 4, 4)
CELLS = Tile(64, 32, 64, 1, 4, 4)
STATES = Tile(64, 64, 128, 4, 8, 4)


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _part_of(step, steps, batch, rows: tl.constexpr, columns: tl.constexpr):
    """What of a step a program has: the direction, cells (1, N), rows (M, 1) and which
    of them there are; whether a step came before; where the step's first row lies."""
    side = tl.program_id(2)
    cell = tl.program_id(0) * columns + tl.arange(0, columns)[None, :]
    row = tl.program_id(1) * rows + tl.arange(0, rows)[:, None]
    inside, begun = row < batch, step > 0
    base = (side * steps + step).to(tl.int64) * batch
    return side, cell, row, inside, begun, base


@triton.jit(do_not_specialize=["step", "steps", "batch"])
def _gates_kernel(
    gates_ptr, weight_ptr, bias_ptr, states_ptr, cells_ptr, hidden_ptr,
    step, steps, batch, cells: tl.constexpr, width: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, inner: tl.constexpr,
):  # fmt: skip
    """Gates (B, 4H) hold what the inputs give; they become sigmoids and tangents. All
    four of a cell lie in one program, which makes its state and its output of them."""
    side, cell, row, inside, begun, base = _part_of(step, steps, batch, rows, columns)
    before = base - batch

    bias_ptr += side * 4 * cells + cell
    gates_ptr += base * (4 * cells) + row * (4 * cells) + cell
    given_i = tl.load(gates_ptr, mask=inside, other=0.0)
    given_f = tl.load(gates_ptr + cells, mask=inside, other=0.0)
    given_g = tl.load(gates_ptr + 2 * cells, mask=inside, other=0.0)
    given_o = tl.load(gates_ptr + 3 * cells, mask=inside, other=0.0)
    place = row * cells + cell
    held = tl.load(
        cells_ptr + before * cells + place, mask=inside & begun, other=0.0
    )  # fmt: skip

    i = tl.zeros((rows, columns), tl.float32)
    f = tl.zeros((rows, columns), tl.float32)
    g = tl.zeros((rows, columns), tl.float32)
    o = tl.zeros((rows, columns), tl.float32)
    k = tl.arange(0, inner)
    states_ptr += before * width + row * width + k[None, :]
    weight_ptr += side * (4 * cells * width) + cell * width + k[:, None]
    for _ in range(0, width, inner):
        state = tl.load(states_ptr, mask=inside & begun, other=0.0)
        i = tl.dot(state, tl.load(weight_ptr), i)
        f = tl.dot(state, tl.load(weight_ptr + cells * width), f)
        g = tl.dot(state, tl.load(weight_ptr + 2 * cells * width), g)
        o = tl.dot(state, tl.load(weight_ptr + 3 * cells * width), o)
        states_ptr += inner
        weight_ptr += inner

    i = tl.sigmoid(i + given_i.to(tl.float32) + tl.load(bias_ptr))
    f = tl.sigmoid(f + given_f.to(tl.float32) + tl.load(bias_ptr + cells))
    g = _tanh(g + given_g.to(tl.float32) + tl.load(bias_ptr + 2 * cells))
    o = tl.sigmoid(o + given_o.to(tl.float32) + tl.load(bias_ptr + 3 * cells))
    held = f * held + i * g
    kind = gates_ptr.dtype.element_ty
    tl.store(gates_ptr, i.to(kind), mask=inside)
    tl.store(gates_ptr + cells, f.to(kind), mask=inside)
    tl.store(gates_ptr + 2 * cells, g.to(kind), mask=inside)
    tl.store(gates_ptr + 3 * cells, o.to(kind), mask=inside)
    tl.store(cells_ptr + base * cells + place, held, mask=inside)
    out = (o * _tanh(held)).to(kind)
    tl.store(hidden_ptr + base * cells + place, out, mask=inside)


@triton.jit(do_not_specialize=["step", "steps", "batch"])
def _cells_kernel(
    grads_ptr, weight_ptr, gates_ptr, cells_ptr, carry_ptr, out_ptr,
    step, steps, batch, cells: tl.constexpr, width: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, inner: tl.constexpr,
):  # fmt: skip
    """Gradients (B, 4H) of what gates are made of, by those of the states (B, P); the
    carry (B, H) is the gradient of the cells, on its way from step to step."""
    side, cell, row, inside, begun, base = _part_of(step, steps, batch, rows, columns)

    place = row * cells + cell
    gate = base * (4 * cells) + row * (4 * cells) + cell
    i = tl.load(gates_ptr + gate, mask=inside, other=0.0)
    f = tl.load(gates_ptr + gate + cells, mask=inside, other=0.0)
    g = tl.load(gates_ptr + gate + 2 * cells, mask=inside, other=0.0)
    o = tl.load(gates_ptr + gate + 3 * cells, mask=inside, other=0.0)
    cells_ptr += base * cells + place
    held = tl.load(cells_ptr, mask=inside, other=0.0)
    before = tl.load(cells_ptr - batch * cells, mask=inside & begun, other=0.0)
    carry_ptr += side.to(tl.int64) * batch * cells + place
    ends = step == steps - 1
    carry = tl.load(carry_ptr, mask=inside & (not ends), other=0.0)

    grad = tl.zeros((rows, columns), tl.float32)
    k = tl.arange(0, inner)
    grads_ptr += base * width + row * width + k[None, :]
    weight_ptr += side * (cells * width) + k[:, None] * cells + cell
    for _ in range(0, width, inner):
        own = tl.load(grads_ptr, mask=inside, other=0.0)
        grad = tl.dot(own, tl.load(weight_ptr), grad)
        grads_ptr += inner
        weight_ptr += inner * cells

    i, f = i.to(tl.float32), f.to(tl.float32)
    g, o = g.to(tl.float32), o.to(tl.float32)
    tangent = _tanh(held)
    carry += grad * o * (1.0 - tangent * tangent)
    kind = out_ptr.dtype.element_ty
    out_ptr += gate
    tl.store(out_ptr, (carry * g * i * (1.0 - i)).to(kind), mask=inside)
    tl.store(
        out_ptr + cells, (carry * before * f * (1.0 - f)).to(kind), mask=inside
    )  # fmt: skip
    tl.store(
        out_ptr + 2 * cells, (carry * i * (1.0 - g * g)).to(kind), mask=inside
    )  # fmt: skip
    tl.store(
        out_ptr + 3 * cells, (grad * tangent * o * (1.0 - o)).to(kind), mask=inside
    )  # fmt: skip
    tl.store(carry_ptr, carry * f, mask=inside)


@triton.jit(do_not_specialize=["left_step", "out_step", "steps", "batch"])
def _product_kernel(
    left_ptr, weight_ptr, out_ptr, parts_ptr, counts_ptr,
    left_step, out_step, steps, batch, depth: tl.constexpr, width: tl.constexpr,
    along: tl.constexpr, across: tl.constexpr, adds: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, inner: tl.constexpr,
    splits: tl.constexpr,
):  # fmt: skip
    """One step's (B, depth) times a weight, whose strides are `along` depth and
    `across` width, into another's (B, width), or added to it. Of the programs that
    share a tile the last one sums their parts, in their order: the same bits always."""
    side, part = tl.program_id(2), tl.program_id(0) % splits
    column = tl.program_id(0) // splits
    to = column * columns + tl.arange(0, columns)[None, :]
    row = tl.program_id(1) * rows + tl.arange(0, rows)[:, None]
    inside = row < batch
    k = part * (depth // splits) + tl.arange(0, inner)
    left = (side * steps + left_step).to(tl.int64) * batch * depth
    left_ptr += left + row * depth + k[None, :]
    weight_ptr += side * (depth * width) + k[:, None] * along + to * across
    out = (side * steps + out_step).to(tl.int64) * batch * width
    out_ptr += out + row * width + to

    total = tl.zeros((rows, columns), tl.float32)
    for _ in range(0, depth // splits, inner):
        own = tl.load(left_ptr, mask=inside, other=0.0)
        total = tl.dot(own, tl.load(weight_ptr), total)
        left_ptr += inner
        weight_ptr += inner * along

    last = True
    if splits > 1:
        tiles = tl.num_programs(0) // splits
        tile = (side * tl.num_programs(1) + tl.program_id(1)) * tiles + column
        at = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]
        parts_ptr += tile * (splits * rows * columns) + at
        tl.store(parts_ptr + part * (rows * columns), total)
        tl.debug_barrier()  # all of the part, before it is counted
        count = tl.atomic_add(counts_ptr + tile, 1)
        last = (count % splits) == splits - 1
        if last:
            total = tl.zeros((rows, columns), tl.float32)
            for other in tl.static_range(splits):
                total += tl.load(
                    parts_ptr + other * (rows * columns), cache_modifier=".cg"
                )  # fmt: skip
    if last:
        if adds:
            total += tl.load(out_ptr, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr, total.to(out_ptr.dtype.element_ty), mask=inside)


def _fitted(tile: Tile, depth: int) -> Tile:
    """As many splits, and as much at a time, as divide a product's depth."""
    while tile.splits > 1 and depth % (tile.splits * tile.inner):
        tile = tile._replace(splits=tile.splits // 2)
    return tile if depth % tile.inner == 0 else tile._replace(inner=MULTIPLE)


class _Product:
    """Launches of `_product_kernel` with one weight, for one run through the steps."""

    def __init__(
        self, left: Tensor, weight: Tensor, out: Tensor, tile: Tile, *, adds: bool
    ) -> None:
        """left (D, T, B, K), weight (D, K, N), out (D, T, B, N)."""
        sides, self.steps, self.batch, self.depth = left.shape
        self.width, tile = out.shape[3], _fitted(tile, self.depth)
        rows = triton.cdiv(self.batch, tile.rows)
        self.grid = (self.width // tile.columns * tile.splits, rows, sides)
        self.tile, self.adds = tile, adds
        self.strides = weight.stride(1), weight.stride(2)
        size = rows * tile.rows * self.width * sides * tile.splits
        some = size if tile.splits > 1 else 1
        parts = torch.empty(some, dtype=torch.float32, device=left.device)
        count = self.width // tile.columns * rows * sides
        counts = torch.zeros(count, dtype=torch.int32, device=left.device)
        self.tensors = left, weight, out, parts, counts

    def __call__(self, left_step: int, out_step: int) -> None:
        tile = self.tile
        _product_kernel[self.grid](
            *self.tensors, left_step, out_step, self.steps, self.batch,
            depth=self.depth, width=self.width,
            along=self.strides[0], across=self.strides[1], adds=self.adds,
            rows=tile.rows, columns=tile.columns, inner=tile.inner,
            splits=tile.splits, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


def forward_steps(
    gates: Tensor, recurrent: Tensor, bias: Tensor, projection: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """gates (D, T, B, 4H), by the inputs alone, become the gates; recurrent (D, 4H, P),
    bias (D, 4H) fp32, projection (D, P, H) -> cells (D, T, B, H) fp32, their outputs
    (D, T, B, H), states (D, T, B, P)."""
    sides, steps, batch, _ = gates.shape
    width, size = projection.shape[1:]
    cells = gates.new_empty((sides, steps, batch, size), dtype=torch.float32)
    hidden = gates.new_empty((sides, steps, batch, size))
    states = gates.new_empty((sides, steps, batch, width))
    project = _Product(hidden, projection.mT, states, PROJECTION, adds=False)
    tile = GATES
    grid = (size // tile.columns, triton.cdiv(batch, tile.rows), sides)
    for step in range(steps):
        _gates_kernel[grid](
            gates, recurrent, bias, states, cells, hidden, step, steps, batch,
            cells=size, width=width, rows=tile.rows, columns=tile.columns,
            inner=tile.inner, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        project(step, step)
    return cells, hidden, states


def backward_steps(
    grads: Tensor, gates: Tensor, cells: Tensor, recurrent: Tensor, projection: Tensor
) -> Tensor:
    """grads (D, T, B, P) of the states, by what reads them, become all of their
    gradients; -> those of what gates are made of (D, T, B, 4H)."""
    sides, steps, batch, size = cells.shape
    width = grads.shape[3]
    grad_gates = torch.empty_like(gates)
    carry = cells.new_empty((sides, batch, size))
    recur = _Product(grad_gates, recurrent, grads, STATES, adds=True)
    tile = CELLS
    grid = (size // tile.columns, triton.cdiv(batch, tile.rows), sides)
    for step in reversed(range(steps)):
        _cells_kernel[grid](
            grads, projection, gates, cells, carry, grad_gates, step, steps, batch,
            cells=size, width=width, rows=tile.rows, columns=tile.columns,
            inner=tile.inner, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if step:
            recur(step, step - 1)
    return grad_gates
