"""Convert rows to the tensors of a step, for all kinds of rows.

The kind of rows (rows/) determines the tensor layout, and the task (tasks/) the
targets. Each micro-batch contains the fields of its rows and these tensors:

    target_index  (K,) position of a target's hidden state in the flattened batch
    labels        (K, ...) the targets; padding has the label that the task ignores

K is the number of rows (tasks with one target per row) or of targets (language models).
If the task compares the samples of a global batch (`Task.whole_batch`), there is also
the field

    target_place  (K,) position of each target in the global batch; padding has the size
                  of the batch

If `train.audit` is set, there is also the field

    target_row    (K,) row number of each target; padding has the number of rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flatout.engine.batches.buffers import Shapes, in_one_buffer, views
from flatout.engine.batches.global_batches import GlobalBatches, Planner
from flatout.engine.rows.layout import (
    Arrays,
    Ints,
    LaidOut,
    Layout,
    pad_end,
    round_up,
)
from flatout.engine.rows.rows import Rows, SplitRows
from flatout.engine.tasks import (
    HeadKind,
    Targets,
    Task,
    has_custom_head,
    ignored_label,
)

PLACE = "target_place"
ROW = "target_row"


MicroBatch = dict[str, Tensor]
"""The tensors of one forward pass, keyed by name. The module docstring lists their
shapes."""


@dataclass
class StepBatch:
    """The data of one rank for one optimizer step. All tensors share one buffer, so
    that sending it to another process, pinning it and copying it to the device are one
    operation each."""

    step: int
    epoch: int
    buffer: Tensor
    """The bytes of all tensors, a uint8 tensor of shape (bytes,)."""
    layout: Shapes
    row_ids: Ints
    """The row numbers (N,) of the global batch, over all ranks."""
    num_samples: int
    """The number of rows in the global batch."""
    num_sequences: int
    """The number of sequences (rows, or parts of long rows) in the global batch."""
    num_targets: int
    """The number of targets in the global batch."""
    divisor: float
    """The divisor of the summed loss: the number of targets, or their total weight."""
    num_tokens: int
    """The number of tokens in the global batch, without padding."""
    rank_tokens: list[int]
    """The number of tokens that each rank processes, including padding."""
    attention_pairs: int
    """The number of pairs of tokens in which one attends to the other, summed over all
    layers. It is 0 if FLOPs are not needed."""

    @property
    def num_padded_tokens(self) -> int:
        """The number of tokens that all ranks process, including padding."""
        return sum(self.rank_tokens)

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """The tensors of each micro-batch, as views of the buffer."""
        return views(self.buffer, self.layout)

    def pin_memory(self) -> StepBatch:
        """Return a copy with a pinned buffer, for the DataLoader's pinning thread. An
        empty buffer, whose batch is in a slot of the ring, is not pinned."""
        if not len(self.buffer):
            return self
        return replace(self, buffer=self.buffer.pin_memory())

    def to(self, device: torch.device) -> StepBatch:
        return replace(self, buffer=self.buffer.to(device, non_blocking=True))


@dataclass
class StepRun:
    """Consecutive steps in one buffer, which is sent, pinned and copied as a whole. For
    small batches, each of these operations takes longer than building the batch."""

    buffer: Tensor
    """The bytes of all steps, a uint8 tensor of shape (bytes,)."""
    sizes: list[int]
    """The size of each step in bytes."""
    facts: list[dict[str, Any]]
    """The fields of each step's batch, except the buffer."""

    @classmethod
    def of(cls, batches: Sequence[StepBatch]) -> StepRun:
        """Join `batches` into one run. The buffer of a single batch is not copied."""
        facts = [dict(vars(batch)) for batch in batches]
        buffers = [own.pop("buffer") for own in facts]
        buffer = buffers[0] if len(buffers) == 1 else torch.cat(buffers)
        return cls(buffer, [own.nbytes for own in buffers], facts)

    def __iter__(self) -> Iterator[StepBatch]:
        buffers = torch.split(self.buffer, self.sizes)
        for buffer, own in zip(buffers, self.facts, strict=True):
            yield StepBatch(buffer=buffer, **own)

    def pin_memory(self) -> StepRun:
        """Return a copy with a pinned buffer, for the DataLoader's pinning thread."""
        return replace(self, buffer=self.buffer.pin_memory())

    def to(self, device: torch.device) -> StepRun:
        return replace(self, buffer=self.buffer.to(device, non_blocking=True))


@dataclass(frozen=True)
class Collator:
    """Converts rows to the tensors of micro-batches, for one task and layout."""

    task: Task
    layout: Layout
    pools_last: bool = False
    """Whether a row is represented by its last token (in decoders), not its first."""
    names_rows: bool = False
    """Whether micro-batches contain `target_row`, for tasks with one target per row."""

    def collate(self, rows: Rows, row_ids: Ints, epoch: int) -> MicroBatch:
        """Return the micro-batch with the rows `row_ids` (B,). If `row_ids` is empty,
        the micro-batch is a single padding token without a loss, so that the rank can
        still take part in collective operations."""
        buffer, layout = self.collate_step(rows, [row_ids], epoch)
        return views(buffer, layout)[0]

    def collate_step(
        self,
        rows: Rows,
        parts: Sequence[Ints],
        epoch: int,
        memory: Tensor | None = None,
        places: Sequence[Ints] = (),
        count: int = 0,
    ) -> tuple[Tensor, Shapes]:
        """Build one micro-batch for each of `parts` (row numbers). Return their buffer,
        which is part of `memory` (bytes,) if it fits, and its layout. If `places` is
        given, it contains the positions of each part's rows in the global batch of
        `count` rows, and the micro-batches have the field `target_place`."""
        found = [self._arrays(rows, ids, epoch) for ids in parts]
        for arrays, own in zip(found, places, strict=False):
            arrays[PLACE] = pad_end(own, len(arrays["labels"]), count)
        return in_one_buffer(found, memory)

    def _arrays(self, rows: Rows, row_ids: Ints, epoch: int) -> Arrays:
        targets = self.task.targets(rows, row_ids, epoch, pools_last=self.pools_last)
        plain = self.task.head_kind is HeadKind.ROW and not has_custom_head(self.task)
        if self.pools_last and plain:
            self._leave_padding(rows, row_ids, targets)
        laid = rows.lay_out(row_ids, self.layout, targets.values)
        index, labels = self._joined(targets, laid)
        found = {**laid.fields, **targets.fields}
        found |= {"target_index": index, "labels": labels}
        if self.names_rows:
            found[ROW] = pad_end(row_ids, len(labels), len(rows))
        return found

    def _leave_padding(self, rows: Rows, row_ids: Ints, targets: Targets) -> None:
        """Move each target in `targets` from the last token to the last token that is
        not padding. A text can itself end with padding tokens, and the decoders in
        transformers skip these too."""
        pad = self.layout.pad_token_id
        for place, ids in zip(targets.places, rows.views(row_ids), strict=True):
            if ids[place[0]] == pad:
                place[0] = max(np.flatnonzero(ids != pad), default=0)

    def _joined(self, targets: Targets, laid: LaidOut) -> tuple[Ints, npt.NDArray[Any]]:
        """Return the positions of all targets in the flattened batch (K,) and their
        labels (K, ...). In packed layouts, both are padded to limit the number of
        shapes."""
        counts = [len(own) for own in targets.places]
        task, layout = self.task, self.layout
        ignored = ignored_label(task.label_dtype)
        if any(counts):
            starts = np.repeat(laid.starts, counts)
            index = np.concatenate(targets.places).astype(np.int64) + starts
            labels = np.concatenate(targets.labels).astype(task.label_dtype)
        else:
            index = np.zeros(1, dtype=np.int64)
            labels = np.full((1, *task.label_shape), ignored, task.label_dtype)
        if not layout.packed and not task.head_kind.one_a_row:
            size = laid.fields["input_ids"].size
            if layout.every_place or len(index) == size:
                return with_all_positions(index, labels, size, ignored)
        if not layout.packed:
            return index, labels
        multiple = (
            layout.row_multiple if task.head_kind.one_a_row else layout.pad_multiple
        )
        size = round_up(len(index), multiple)
        return pad_end(index, size, 0), pad_end(labels, size, ignored)


def with_all_positions(
    index: Ints, labels: npt.NDArray[Any], size: int, ignored: float
) -> tuple[Ints, npt.NDArray[Any]]:
    """Return all positions `range(size)`, and labels (size, ...) that are `ignored`
    except at the positions `index`. The model then need not select hidden states."""
    found = np.full((size, *labels.shape[1:]), ignored, labels.dtype)
    found[index] = labels
    return np.arange(size), found


@dataclass(frozen=True)
class StepRows:
    """A map-style dataset of batches, indexed by the step."""

    rows: SplitRows
    batches: GlobalBatches
    planner: Planner
    collator: Collator
    rank: int = 0
    count_pairs: Callable[[Ints], int] | None = None
    """A function that counts the attention pairs of rows with the given lengths. It is
    None if FLOPs are not needed."""

    def __getitem__(self, step: int) -> StepBatch:
        return self.made(step)

    def made(self, step: int, memory: Tensor | None = None) -> StepBatch:
        """Return the batch of `step`. It is stored in `memory` (bytes,) if it fits."""
        row_ids = self.batches.rows(step)
        return self.cut(row_ids, step, self.batches.epoch(step), memory)

    def cut(
        self, row_ids: Ints, step: int, epoch: int, memory: Tensor | None = None
    ) -> StepBatch:
        """Return this rank's part of the global batch with the rows `row_ids` (N,). It
        is stored in `memory` (bytes,) if it fits."""
        rows, ids = self.rows.sequences(row_ids)
        lengths = rows.lengths(ids)
        plan = self.planner.plan(lengths)
        mine = plan[self.rank]
        parts = [ids[own] for own in mine]
        padded, task = self.collator.layout.num_padded_tokens, self.collator.task
        buffer, layout = self.collator.collate_step(
            rows, parts, epoch, memory, mine if task.whole_batch else (), len(ids)
        )
        num_targets = task.num_targets(rows, ids, epoch)
        divisor = task.divisor(rows, ids, epoch)
        return StepBatch(
            step=step,
            epoch=epoch,
            buffer=buffer,
            layout=layout,
            row_ids=row_ids,
            num_samples=len(row_ids),
            num_sequences=len(ids),
            num_targets=num_targets,
            divisor=num_targets if divisor is None else divisor,
            num_tokens=int(lengths.sum()),
            rank_tokens=[sum(padded(lengths[own]) for own in rank) for rank in plan],
            attention_pairs=self.count_pairs(lengths) if self.count_pairs else 0,
        )

    def __len__(self) -> int:
        return self.batches.steps_per_epoch
