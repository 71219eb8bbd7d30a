"""Token rows -> tensors: right padding, or packing without padding.

Both layouts give the same fields, so that everything behind them is written once:

    input_ids     (B, T) right-padded, or (1, P): rows laid end to end
    attention_mask (B, T) bool, padded layout only
    position_ids  (1, P), packed layout only: position of each token in its row
    cu_seqlens    (R + 1,) int32, packed layout only: first token of each row, and P
    target_index  (K,) where a target's hidden state lies among the B*T or P tokens
    labels        (K,) the targets; IGNORED (or NaN, for regression) where there is none

K is the number of rows (one target a row) or of target tokens (language models).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flatout.engine.batching import GlobalBatches, Ints, Planner
from flatout.engine.settings import CLASSIFIES, Task
from flatout.engine.tokens import TokenRows

IGNORED = -100
"""Label without a target (PyTorch's own convention)."""


@dataclass
class MicroBatch:
    """Tensors of one forward pass; shapes in the module's docstring."""

    input_ids: Tensor
    target_index: Tensor
    labels: Tensor
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    cu_seqlens: Tensor | None = None
    token_type_ids: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The fields that are there, by name."""
        named = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in named.items() if value is not None}


Layout = list[dict[str, tuple[int, torch.dtype, tuple[int, ...]]]]
"""For each micro-batch: name -> offset in bytes, type and shape in the buffer."""


@dataclass
class StepBatch:
    """What one rank needs for one optimizer step.

    All tensors lie in one buffer: handing it to another process, pinning it and
    copying it to the device are one operation each.
    """

    step: int
    epoch: int
    buffer: Tensor
    """(bytes,) uint8."""
    layout: Layout
    row_ids: Ints
    """(N,) rows of the global batch, over all ranks."""
    num_samples: int
    """Rows of the global batch."""
    num_targets: int
    """Targets of the global batch: the denominator of its mean loss."""
    num_tokens: int
    """Real tokens of the global batch."""
    num_padded_tokens: int
    """Tokens that all ranks compute for it, padding included."""
    squared_lengths: int
    """Sum of squared row lengths: what attention costs."""

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """Views into the buffer."""
        return [
            MicroBatch(**{n: _view(self.buffer, *place) for n, place in part.items()})
            for part in self.layout
        ]

    def pin_memory(self) -> StepBatch:
        """Called by the DataLoader's pinning thread."""
        return replace(self, buffer=self.buffer.pin_memory())

    def to(self, device: torch.device) -> StepBatch:
        return replace(self, buffer=self.buffer.to(device, non_blocking=True))


ALIGNMENT = 64
"""Bytes; a tensor begins at a multiple of it."""


def flatten(micro_batches: list[MicroBatch]) -> tuple[Tensor, Layout]:
    """All tensors into one buffer (bytes,), and where each of them lies."""
    layout: Layout = []
    size = 0
    for micro in micro_batches:
        places = {}
        for name, tensor in micro.tensors().items():
            places[name] = (size, tensor.dtype, tuple(tensor.shape))
            size = _round_up(size + tensor.nbytes, ALIGNMENT)
        layout.append(places)
    buffer = torch.empty(size, dtype=torch.uint8)
    for micro, places in zip(micro_batches, layout, strict=True):
        for name, tensor in micro.tensors().items():
            _view(buffer, *places[name]).copy_(tensor)
    return buffer, layout


def _view(
    buffer: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    size = math.prod(shape) * dtype.itemsize
    return buffer[offset : offset + size].view(dtype).view(shape)


@dataclass(frozen=True)
class Collator:
    """How rows become tensors for one task and tokenizer."""

    task: Task
    packed: bool
    pad_token_id: int
    last_token_pools: bool = False
    """Decoders classify from the last token of a row, encoders from the first."""
    pad_to_length: int | None = None
    """Padded layout: pad to this length (`fixed`) instead of the longest row."""
    pad_multiple: int = 1
    """Padded length, or packed total, rounded up to a multiple of it."""
    row_multiple: int = 1
    """Packed layout: R, and K where it is R, rounded up to a multiple of it, with empty
    rows and IGNORED targets, so that few shapes occur."""
    max_length: int = 512
    """Packed layout: longest row of padding at the end."""
    mask_token_id: int | None = None
    special_token_ids: tuple[int, ...] = ()
    vocab_size: int = 0
    mask_probability: float = 0.15
    seed: int = 0
    extra_columns: tuple[str, ...] = field(default=())

    def collate(self, rows: TokenRows, row_ids: Ints, epoch: int) -> MicroBatch:
        """Tensors for `row_ids` (B,); an empty batch gives one padding token whose
        loss is zero, so that a rank without rows still takes part in collectives."""
        sequences = [np.asarray(view) for view in rows.views(row_ids)]
        targets = self._targets(rows, row_ids, sequences, epoch)
        if self.packed:
            batch = self._pack(sequences, targets)
        else:
            batch = self._pad(sequences, targets)
        for column in self.extra_columns:
            views = rows.views(row_ids, column)
            setattr(batch, column, self._lay_out(views, batch.input_ids.shape))
        return batch

    def num_padded_tokens(self, lengths: Ints) -> int:
        """Tokens of the tensor that rows of `lengths` (B,) become."""
        if self.packed:
            return _round_up(max(1, int(lengths.sum())), self.pad_multiple)
        return max(1, len(lengths)) * self._width(lengths)

    def _width(self, lengths: Ints) -> int:
        longest = int(lengths.max(initial=1))
        # The model may have no positions beyond max_length.
        rounded = min(_round_up(longest, self.pad_multiple), self.max_length)
        return self.pad_to_length or max(longest, rounded)

    def num_targets(self, rows: TokenRows, row_ids: Ints, epoch: int) -> int:
        """Targets of the global batch `row_ids` (N,)."""
        if self.task in CLASSIFIES:
            return len(row_ids)
        if self.task == "causal-lm":
            return int((rows.lengths(row_ids) - 1).clip(0).sum())
        return sum(self._mask_count(np.asarray(view)) for view in rows.views(row_ids))

    def _targets(
        self, rows: TokenRows, row_ids: Ints, sequences: list[Any], epoch: int
    ) -> list[tuple[Ints, npt.NDArray[Any]]]:
        """For each row: places (K_r,) in the row, and the labels (K_r,) there."""
        if self.task in CLASSIFIES:
            return [
                (np.array([len(ids) - 1 if self.last_token_pools else 0]), label)
                for ids, label in zip(
                    sequences, self._labels(rows, row_ids), strict=True
                )
            ]
        if self.task == "causal-lm":
            return [(np.arange(len(ids) - 1), ids[1:]) for ids in sequences]
        masked = [
            self._mask(ids, int(row), epoch)
            for ids, row in zip(sequences, row_ids, strict=True)
        ]
        sequences[:] = [ids for ids, _, _ in masked]
        return [(places, labels) for _, places, labels in masked]

    def _labels(self, rows: TokenRows, row_ids: Ints) -> npt.NDArray[Any]:
        if rows.labels is None:
            raise ValueError(f"task {self.task} needs token rows with a column labels")
        return rows.labels[row_ids].reshape(-1, 1)

    def _mask_count(self, ids: npt.NDArray[Any]) -> int:
        candidates = len(ids) - int(np.isin(ids, self.special_token_ids).sum())
        return min(candidates, max(1, round(self.mask_probability * candidates)))

    def _mask(
        self, ids: npt.NDArray[Any], row: int, epoch: int
    ) -> tuple[Any, Any, Any]:
        """Masked copy, places and labels of a row: a function of (seed, epoch, row).

        A fixed share of the row's tokens; of these 80 % become [MASK], 10 % a random
        piece, 10 % stay (Devlin et al. 2018, create_pretraining_data.py).
        """
        rng = np.random.default_rng([self.seed, epoch, row])
        candidates = np.flatnonzero(~np.isin(ids, self.special_token_ids))
        count = self._mask_count(ids)
        places = np.sort(rng.choice(candidates, count, replace=False))
        chance = rng.random(count)
        masked = ids.copy()
        masked[places[chance < 0.8]] = self.mask_token_id
        random_places = places[chance >= 0.9]
        masked[random_places] = rng.integers(0, self.vocab_size, len(random_places))
        return masked, places, ids[places]

    def _pad(self, sequences: list[Any], targets: list[Any]) -> MicroBatch:
        lengths = np.array([len(ids) for ids in sequences] or [1])
        width = self._width(lengths)
        shape = (len(lengths), width)  # (B, T)
        starts = np.arange(len(lengths)) * width
        index, labels = self._join_targets(targets, starts)
        mask = np.arange(width) < lengths[:, None]  # (B, T)
        return MicroBatch(
            input_ids=self._lay_out(sequences, shape, self.pad_token_id),
            attention_mask=torch.from_numpy(mask),
            target_index=torch.from_numpy(index),
            labels=torch.from_numpy(labels),
        )

    def _pack(self, sequences: list[Any], targets: list[Any]) -> MicroBatch:
        lengths = np.array([len(ids) for ids in sequences], dtype=np.int64)
        total = int(lengths.sum())
        padded = _round_up(max(1, total), self.pad_multiple)
        # What is left of the total is padding in rows of its own.
        filler = np.arange(total, padded, self.max_length)[1:]
        tail = [padded] if padded > total else []
        bounds = np.concatenate([[0], np.cumsum(lengths), filler, tail]).astype(int)
        positions = np.arange(padded) - np.repeat(bounds[:-1], np.diff(bounds))
        index, labels = self._join_targets(targets, bounds)
        num_rows = _round_up(len(bounds) - 1, self.row_multiple)
        one_a_row = self.task in CLASSIFIES
        multiple = self.row_multiple if one_a_row else self.pad_multiple
        num_targets = _round_up(len(index), multiple)
        return MicroBatch(
            input_ids=self._lay_out(sequences, (1, padded), self.pad_token_id),
            position_ids=torch.from_numpy(positions).unsqueeze(0),
            cu_seqlens=_fill(bounds, num_rows + 1, padded).int(),
            target_index=_fill(index, num_targets, 0),
            labels=_fill(labels, num_targets, _ignored(labels.dtype)),
        )

    def _join_targets(
        self, targets: list[Any], starts: Ints
    ) -> tuple[Ints, npt.NDArray[Any]]:
        """Places in rows -> places among all tokens (K,), with the labels (K,)."""
        dtype = np.dtype(np.float32 if self.task == "regression" else np.int64)
        if not sum(len(places) for places, _ in targets):
            return np.zeros(1, dtype=np.int64), np.full(1, _ignored(dtype), dtype)
        starts = starts[: len(targets)]
        places = [own + start for (own, _), start in zip(targets, starts, strict=True)]
        labels = np.concatenate([labels for _, labels in targets])
        return np.concatenate(places), labels.astype(dtype)

    def _lay_out(self, views: Sequence[Any], shape: Any, fill: int = 0) -> Tensor:
        """Rows into one buffer of `shape`: each on a line of its own, or in a row."""
        buffer = np.full(tuple(shape), fill, dtype=np.int64)
        if self.packed:
            if views:
                joined = np.concatenate(views)
                buffer[0, : len(joined)] = joined
        else:
            for line, view in zip(buffer, views, strict=False):
                line[: len(view)] = view
        return torch.from_numpy(buffer)


def _ignored(dtype: np.dtype[Any]) -> float:
    return float("nan") if dtype.kind == "f" else IGNORED


def _fill(values: npt.NDArray[Any], size: int, fill: float) -> Tensor:
    """`values` (n,) followed by `fill` up to `size`."""
    return torch.from_numpy(
        np.pad(values, (0, size - len(values)), constant_values=fill)
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class StepRows:
    """Map-style data of a DataLoader whose index is the step."""

    rows: TokenRows
    batches: GlobalBatches
    planner: Planner
    collator: Collator
    rank: int = 0

    def __getitem__(self, step: int) -> StepBatch:
        row_ids = self.batches.rows(step)
        epoch = self.batches.epoch(step)
        return self.cut(row_ids, step, epoch)

    def cut(self, row_ids: Ints, step: int, epoch: int) -> StepBatch:
        """This rank's share of the global batch `row_ids` (N,)."""
        lengths = self.rows.lengths(row_ids)
        plan = self.planner.plan(lengths)
        mine = plan.micro_batches[self.rank]
        buffer, layout = flatten(
            [self.collator.collate(self.rows, row_ids[own], epoch) for own in mine]
        )
        return StepBatch(
            step=step,
            epoch=epoch,
            buffer=buffer,
            layout=layout,
            row_ids=row_ids,
            num_samples=len(row_ids),
            num_targets=self.collator.num_targets(self.rows, row_ids, epoch),
            num_tokens=int(lengths.sum()),
            num_padded_tokens=sum(
                self.collator.num_padded_tokens(lengths[own])
                for rank in plan.micro_batches
                for own in rank
            ),
            squared_lengths=int((lengths * lengths).sum()),
        )

    def __len__(self) -> int:
        return self.batches.steps_per_epoch
