"""The Trainer without padding: its flattening collator, and attention that keeps rows
apart in what it gives.

transformers would call FlashAttention's package there. It is hard to come by, so the
peer gets PyTorch's own flash kernel over rows of any length, by the way in which
flatout calls it, or FlashAttention 4 where flatout is told to take that.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from flatout.engine.families import family_of
from flatout.engine.ops.attention import packed_attention
from flatout.engine.tasks import TaskError
from flatout.engine.train.setup.job import TrainJob

FLATTENED = "flatout_flattened"
"""Name of the attention among transformers' implementations."""


def flattening_collator(job: TrainJob, model: Any) -> Any:
    """transformers' collator, with the bounds that attention needs; its attention is
    registered. Raises TaskError where model or collator do not take the rows."""
    from transformers import AttentionInterface, DataCollatorWithFlattening

    family = family_of(model.config)
    if job.vocabulary is None or not (family.attends and family.packs):
        kind = model.config.model_type
        raise TaskError(f"refused by flatout: no padding-free attention for {kind}")
    own = job.settings.runtime.attention == "flash4"
    AttentionInterface.register(FLATTENED, partial(_attention, flash4=own))
    offset = family.position_offset(model.config)
    options = {"position_ids_start": offset} if offset else {}
    try:
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, **options)
        rows = job.train.table.slice(0, 2).to_pylist()
        names = ("input_ids", "labels")
        collator([{n: row[n] for n in names if n in row} for row in rows])
    except TypeError as error:
        raise TaskError(
            "refused by transformers: DataCollatorWithFlattening takes a label for "
            f"each token, and {job.settings.model.task} has one for each row"
        ) from error
    return collator


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """(1, H, P, D), (1, G, P, D) twice -> (1, P, H, D)."""
    bounds = {
        "cu_seqlens": kwargs.pop("cu_seq_lens_q"),
        "max_seqlen": kwargs.pop("max_length_q"),
    }
    return packed_attention(
        module, query, key, value, attention_mask, **bounds, **kwargs
    )


def samples_of(inputs: Mapping[str, Any]) -> int:
    """Rows of a batch, flattened or not."""
    bounds = inputs.get("cu_seq_lens_q")
    return len(inputs["labels"]) if bounds is None else len(bounds) - 1
