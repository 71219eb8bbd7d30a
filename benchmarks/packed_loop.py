"""A hand-written training loop with packed rows and a compiled model.

Rows are concatenated in a buffer of fixed size. Only the end of the buffer is padding,
and the compiled model always sees the same shape. The loop has no checkpoints, logs or
evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.training import (
    DEVICE,
    IS_CUDA,
    PAD,
    Shape,
    Stopwatch,
    register_packed_attention,
    token_table,
)


class PackedBatches(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """Yields random global batches, each in one buffer that ends with padding rows."""

    def __init__(self, shape: Shape) -> None:
        self.shape, table = shape, token_table(shape)
        column = table["input_ids"].combine_chunks()
        self.ids = column.values.to_numpy()
        self.bounds = column.offsets.to_numpy()
        self.labels = (
            table["labels"].to_numpy() if "labels" in table.schema.names else None
        )
        lengths = np.sort(np.diff(self.bounds))
        most = int(lengths[-shape.batch :].sum())
        usual = shape.batch * lengths.mean() + 3 * shape.batch**0.5 * lengths.std()
        self.size = -(-min(most, int(usual)) // 64) * 64 + 64
        self.more = -(-self.size // shape.longest)
        """Number of padding rows in each batch. None is longer than `shape.longest`."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        info = torch.utils.data.get_worker_info()
        chance = np.random.default_rng(info.id if info else 0)
        while True:
            rows = chance.integers(0, len(self.bounds) - 1, self.shape.batch)
            parts = [self.ids[self.bounds[r] : self.bounds[r + 1]] for r in rows]
            lengths = [len(part) for part in parts]
            if sum(lengths) >= self.size:  # rare: beyond three standard deviations
                continue
            used = sum(lengths)
            lengths += map(len, np.array_split(np.arange(self.size - used), self.more))
            ids = np.full(self.size, PAD, np.int64)
            ids[:used] = np.concatenate(parts)
            bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            places = np.arange(self.size) - np.repeat(bounds[:-1], lengths)
            batch = {"ids": ids, "bounds": bounds, "places": places}
            if self.labels is None:  # the next token, except at the end of a row
                following = np.roll(ids, -1)
                following[bounds[1:] - 1] = -100
                following[used:] = -100
                batch["labels"] = following
            else:
                batch["labels"] = self.labels[rows]
            yield {name: torch.from_numpy(values) for name, values in batch.items()}


def loss_of(model: Any, batch: dict[str, Tensor], longest: int) -> Tensor:
    """Return the mean cross entropy. A classifier predicts the label of each row from
    its first token. A language model predicts the next tokens."""
    given = {
        "input_ids": batch["ids"][None],
        "position_ids": batch["places"][None],
        "cu_seq_lens_q": batch["bounds"],
        "max_length_q": longest,
    }
    if hasattr(model, "classifier"):
        states = model.base_model(**given)[0]
        first = states[0][batch["bounds"][: len(batch["labels"])].long()]
        pooled = model.base_model.pooler(first[:, None])
        logits = model.classifier(model.dropout(pooled))
    else:
        logits = model.lm_head(model.base_model(**given, use_cache=False)[0])[0]
    return nn.functional.cross_entropy(logits.float(), batch["labels"])


def packed_loop(shape: Shape, model: Any) -> dict[str, Any]:
    """Train with the loop and return its throughput."""
    model.set_attn_implementation(register_packed_attention())
    model.to(DEVICE).train()
    torch.set_float32_matmul_precision("high")
    batches = PackedBatches(shape)
    loader = torch.utils.data.DataLoader(
        batches, None, num_workers=4 if IS_CUDA else 0, pin_memory=IS_CUDA
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step = torch.compile(loss_of, dynamic=False) if IS_CUDA else loss_of
    watch = Stopwatch(shape)
    for batch in loader:
        moved = {k: v.to(DEVICE, non_blocking=True) for k, v in batch.items()}
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=IS_CUDA):
            loss = step(model, moved, shape.longest)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if watch.step():
            break
    return watch.figures()
