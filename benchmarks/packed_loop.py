"""A hand-written training loop with packed rows.

The rows of each batch are concatenated. On a GPU, the model is compiled once for all
numbers of tokens. Small batches are faster with CUDA graphs, of which there is one per
number of tokens, so they are padded to a multiple of 256 tokens. On a CPU, the multiple
is 64, because oneDNN prepares a matrix multiplication for each new number of tokens.
The loop has no checkpoints, logs or evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
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
    """Yields random global batches of concatenated rows. A last row of padding, which
    may be empty, makes their number of tokens a multiple of `multiple`."""

    def __init__(self, shape: Shape, multiple: int) -> None:
        self.shape, self.multiple, table = shape, multiple, token_table(shape)
        column = table["input_ids"].combine_chunks()
        self.ids = column.values.to_numpy()
        self.bounds = column.offsets.to_numpy()
        self.labels = (
            table["labels"].to_numpy() if "labels" in table.schema.names else None
        )

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        info = torch.utils.data.get_worker_info()
        chance = np.random.default_rng(info.id if info else 0)
        while True:
            rows = chance.integers(0, len(self.bounds) - 1, self.shape.batch)
            parts = [self.ids[self.bounds[r] : self.bounds[r + 1]] for r in rows]
            used = sum(map(len, parts))
            size = -(-used // self.multiple) * self.multiple
            ids = np.full(size, PAD, np.int64)
            ids[:used] = np.concatenate(parts)
            lengths = [0, *map(len, parts), size - used]
            bounds = np.cumsum(lengths, dtype=np.int32)
            places = np.arange(size) - np.repeat(bounds[:-1], lengths[1:])
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
        if hasattr(model, "head"):  # ModernBERT
            logits = model.classifier(model.drop(model.head(first)))
        else:
            pooled = model.base_model.pooler(first[:, None])
            logits = model.classifier(model.dropout(pooled))
    else:
        logits = model.lm_head(model.base_model(**given, use_cache=False)[0])[0]
    return nn.functional.cross_entropy(logits.float(), batch["labels"])


def packed_loop(shape: Shape, model: Any) -> dict[str, Any]:
    """Train with the loop and return its throughput."""
    graphs = IS_CUDA and shape.batch * shape.mean_tokens < 4_096
    model.set_attn_implementation(register_packed_attention())
    model.to(DEVICE).train()
    torch.set_float32_matmul_precision("high")
    multiple = (256 if graphs else 1) if IS_CUDA else 64
    batches = PackedBatches(shape, multiple)
    loader = torch.utils.data.DataLoader(
        batches, None, num_workers=4 if IS_CUDA else 0, pin_memory=IS_CUDA
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step = partial(loss_of, model, longest=shape.longest)
    if IS_CUDA:
        step = torch.compile(step, mode="reduce-overhead" if graphs else None)
    watch = Stopwatch(shape)
    for batch in loader:
        moved = {k: v.to(DEVICE, non_blocking=True) for k, v in batch.items()}
        if graphs:
            torch.compiler.cudagraph_mark_step_begin()
        for values in moved.values():
            if len(values) == len(moved["ids"]):
                torch._dynamo.mark_dynamic(values, 0)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=shape.bf16):
            loss = step(moved)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if watch.step():
            break
    return watch.figures()
