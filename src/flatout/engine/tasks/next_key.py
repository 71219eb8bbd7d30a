"""The next key of a session of log keys, and how unexpected the worst one is.

DeepLog (Du et al. 2017) calls a session abnormal where one of its keys is not among the
g likeliest behind those before it: where the rank of its worst key is g or more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.tasks._task import IGNORED
from flatout.engine.tasks.causal_lm import CausalLM

if TYPE_CHECKING:
    from torch import Tensor


class NextKey(CausalLM):
    """A session is a row: a start, its keys, an end. Every key and the end are targets,
    so that a session that breaks off is unexpected, too."""

    joins_texts = False
    answers_rows = True
    whole_words = True

    def row_outputs(self, logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """(B, 2): rank of a row's worst key, and the place of the first such one. A
        rank is the number of likelier keys; an unknown key's is the vocabulary."""
        import torch

        labels, places = batch["labels"], batch["target_index"] + 1
        rows, length = batch["input_ids"].shape
        likelihood = logits.gather(1, labels.clamp(min=0).unsqueeze(1))
        ranks = (logits > likelihood).sum(1)
        unknown = None if self.vocabulary is None else self.vocabulary.unknown_token_id
        if unknown is not None:
            ranks = ranks.masked_fill(labels == unknown, logits.shape[1])
        ranks = ranks.masked_fill(labels == IGNORED, -1)
        found = ranks.new_full((rows, length), -1)
        found.view(-1)[places.clamp(max=rows * length - 1)] = ranks
        return torch.stack([found.amax(1), found.argmax(1)], dim=1)

    def answer_fields(self) -> list[Any]:
        """Both of `row_outputs`."""
        return [pa.field("rank", pa.int64()), pa.field("place", pa.int64())]

    def answers(self, logits: npt.NDArray[np.float32]) -> Mapping[str, Any]:
        """Place 1 is a session's first key."""
        rank, place = logits.astype(np.int64).T
        return {"rank": rank, "place": place}


TASK = NextKey
