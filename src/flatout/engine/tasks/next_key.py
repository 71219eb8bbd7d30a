"""Prediction of the next key in a session of log keys, for anomaly detection.

DeepLog (Du et al. 2017) calls a session abnormal if one of its keys is not among the g
likeliest keys at its position. If ranks are counted from 0, this means that the highest
rank in the session is g or more. The paper does not model the end of a session. The
rank of an end token is meaningless if a model was trained without end tokens, so these
are scored by their probability instead."""

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
    """Predict each key of a session and its end. Each session is one row with a start
    token, the keys and an end token, so that an early end can be detected."""

    texts = replace(CausalLM.texts, joined=False, whole_words=True)

    def target_outputs(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the rank and the end probability of each target, as a tensor (K, 2).
        The rank is the number of keys that are likelier than the target. The rank of an
        unknown key is the vocabulary size. If the target is not a key, the rank is -1.
        The end probability is 1 if the target is not an end."""
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
        """Return the highest rank of a key in each session, its first position (counted
        from 1), and the probability of the end (1 without an end)."""
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
        """The id of the unknown key, or -1 (never a label) if there is none."""
        number = None if self.vocabulary is None else self.vocabulary.unknown_token_id
        return -1 if number is None else number

    def _special(self, logits: Tensor) -> Tensor:
        """Return a boolean mask (V,) that is true for tokens that are not keys."""
        import torch

        found = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
        if self.vocabulary is not None:
            found[list(self.vocabulary.special_token_ids)] = True
        return found

    def answer_fields(self) -> list[Any]:
        whole = [pa.field(name, pa.int64()) for name in ("rank", "place")]
        return [*whole, pa.field("end_probability", pa.float32())]
