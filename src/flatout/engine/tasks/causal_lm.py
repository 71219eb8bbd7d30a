"""The next token, at every token."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from flatout.engine.data.first_look import (
    FirstLook,
    Guessed,
    are_prose,
    are_texts,
    named,
)
from flatout.engine.rows.layout import Ints
from flatout.engine.rows.rows import Rows
from flatout.engine.tasks._shared.text_scores import ScoresTexts
from flatout.engine.tasks._task import IGNORED, HeadKind, Targets

PROMPTS = ("prompt", "question", "instruction", "input")
COMPLETIONS = ("completion", "answer", "response", "output")


class CausalLM(ScoresTexts):
    """Each token but a row's first is a target."""

    auto_class = "AutoModelForCausalLM"
    architectures = ("ForCausalLM", "LMHeadModel")
    head = HeadKind.VOCABULARY
    causal = True
    predicts_neighbours = True
    joins_texts = True
    learns_completions = True
    pipeline_tag = "text-generation"
    guess_order: ClassVar[int | None] = 0

    @property
    def targets_per_token(self) -> float:
        """All of them."""
        return 1.0

    @classmethod
    def guess_rows(cls, look: FirstLook) -> Guessed | None:
        """Messages, or prompts and completions."""
        return _chats(look) or _completions(look)

    def targets(
        self, rows: Rows, row_ids: Ints, epoch: int, *, pools_last: bool
    ) -> Targets:
        """At each token the one behind it; of completions those alone."""
        if rows.has_token_labels:
            labels = [view[1:] for view in rows.views(row_ids, "labels")]
            places = [np.flatnonzero(view != IGNORED) for view in labels]
            chosen = zip(labels, places, strict=True)
            return Targets(places, [view[own] for view, own in chosen])
        found = rows.views(row_ids)
        return Targets([np.arange(len(i) - 1) for i in found], [i[1:] for i in found])

    def num_targets(self, rows: Rows, row_ids: Ints, epoch: int) -> int:
        """Tokens without the first of each row; of completions those alone."""
        if rows.has_token_labels:
            views = rows.views(row_ids, "labels")
            return sum(int((view[1:] != IGNORED).sum()) for view in views)
        return int((rows.lengths(row_ids) - 1).clip(0).sum())


def _chats(look: FirstLook) -> Guessed | None:
    for name, values in look.columns.items():
        turns = values[0]
        if isinstance(turns, list) and turns and isinstance(turns[0], dict):
            if {"role", "content"} <= turns[0].keys():
                texts = [" ".join(str(t.get("content")) for t in v) for v in values]
                split = {"messages_column": name, "label_column": None}
                why = f"{name} holds messages with role and content"
                return Guessed(split, why, texts)
    return None


def _completions(look: FirstLook) -> Guessed | None:
    columns = look.columns
    texts = [name for name, values in columns.items() if are_texts(values)]
    prompt, completion = named(texts, PROMPTS), named(texts, COMPLETIONS)
    if prompt is None or completion is None or not are_prose(columns[prompt]):
        return None
    if not (pairs := look.pairs(prompt, completion)):
        return None
    split = {
        "prompt_column": prompt,
        "completion_column": completion,
        "label_column": None,
    }
    joined = [f"{one} {other}" for one, other in pairs]
    return Guessed(split, f"{completion} completes {prompt}", joined)


TASK = CausalLM
