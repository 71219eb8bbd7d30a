"""Prediction of the next key in a session of log keys, for anomaly detection.

DeepLog (Du et al. 2017) calls a session abnormal if one of its keys is not among the g
likeliest after those before it: if the rank of its worst key is g or more. The paper
has no end of a session. A model that never saw an end ranks it at random among the
unseen keys, so the end is evaluated by its probability.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.tasks._task import IGNORED, Tensor
from flatout.engine.tasks.causal_lm import CausalLM


class NextKey(CausalLM):
    """A session is a row: a start, its keys, an end. Every key and the end are targets,
    so that a session that breaks off is unexpected, too."""

    texts = replace(CausalLM.texts, joined=False, whole_words=True)

    def target_outputs(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return (K, 2): the rank of a key (-1 for no key), and the probability of an
        end (1 for no end). A rank is the number of likelier keys; an unknown key's is
        the vocabulary size."""
        import torch

        known = labels.clamp(min=0)
        special, unknown = self._special(logits), known == self._unknown
        ends = special[known] & ~unknown & (labels != IGNORED)
        likelihood = logits.gather(1, known.unsqueeze(1))
        ranks = ((logits > likelihood) & ~special).sum(1)
        ranks = ranks.masked_fill(unknown, logits.shape[1])
        ranks = ranks.masked_fill(ends | (labels == IGNORED), -1)
        probability = logits.float().softmax(1).gather(1, known.unsqueeze(1))
        probability = probability.squeeze(1).masked_fill(~ends, 1.0)
        return torch.stack([ranks.float(), probability], dim=1)

    def row_answers(
        self, logits: npt.NDArray[np.float32], rows: Any
    ) -> Mapping[str, Any]:
        """Return rank of a session's worst key, the first place of this rank (1 is the
        first key), and the probability of the session's end, 1 without an end."""
        ranks, ends = logits.T
        counts = rows.lengths(np.arange(len(rows))) - 1
        row = np.repeat(np.arange(len(rows)), counts)
        worst, end = np.full(len(rows), -1.0), np.ones(len(rows))
        np.maximum.at(worst, row, ranks)
        np.minimum.at(end, row, ends)
        at = np.flatnonzero(ranks == worst[row])
        known, first = np.unique(row[at], return_index=True)
        place = np.zeros(len(rows), np.int64)
        place[known] = 1 + at[first] - (np.cumsum(counts) - counts)[known]
        place[worst < 0] = 0  # a session without a key
        return {"rank": worst.astype(int), "place": place, "end_probability": end}

    @property
    def _unknown(self) -> int:
        """Number of the unknown key; -1, which is no label, if it does not exist."""
        number = None if self.vocabulary is None else self.vocabulary.unknown_token_id
        return -1 if number is None else number

    def _special(self, logits: Tensor) -> Tensor:
        """Return (V,) bool: pieces of the vocabulary that are not keys."""
        import torch

        found = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
        if self.vocabulary is not None:
            found[list(self.vocabulary.special_token_ids)] = True
        return found

    def answer_fields(self) -> list[Any]:
        whole = [pa.field(name, pa.int64()) for name in ("rank", "place")]
        return [*whole, pa.field("end_probability", pa.float32())]
