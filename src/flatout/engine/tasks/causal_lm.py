"""Causal language modelling: predicting the next token at every position."""

from __future__ import annotations

import numpy as np

from flatout.engine.rows.layout import Ints
from flatout.engine.rows.rows import Rows
from flatout.engine.tasks._shared.cross_entropy import Pieces
from flatout.engine.tasks._task import IGNORED, HeadKind, Targets, Texts


class CausalLM(Pieces):
    """Predict every token of a row except the first."""

    auto_class = "AutoModelForCausalLM"
    architectures = ("ForCausalLM", "LMHeadModel")
    head_kind = HeadKind.VOCABULARY
    texts = Texts(completions=True, causal=True, predicts_neighbours=True, joined=True)
    pipeline_tag = "text-generation"
    targets_per_token = 1.0

    def targets(
        self, rows: Rows, row_ids: Ints, epoch: int, *, pools_last: bool
    ) -> Targets:
        """Return the next token at each position. If rows consist of prompts and
        completions, only tokens of completions are targets."""
        if rows.has_token_labels:
            labels = [view[1:] for view in rows.views(row_ids, "labels")]
            places = [np.flatnonzero(view != IGNORED) for view in labels]
            chosen = zip(labels, places, strict=True)
            return Targets(places, [view[own] for view, own in chosen])
        found = rows.views(row_ids)
        return Targets([np.arange(len(i) - 1) for i in found], [i[1:] for i in found])

    def num_targets(self, rows: Rows, row_ids: Ints, epoch: int) -> int:
        """Return the number of tokens except the first of each row. If rows consist of
        prompts and completions, return the number of completion tokens."""
        if rows.has_token_labels:
            views = rows.views(row_ids, "labels")
            return sum(int((view[1:] != IGNORED).sum()) for view in views)
        return int((rows.lengths(row_ids) - 1).clip(0).sum())
