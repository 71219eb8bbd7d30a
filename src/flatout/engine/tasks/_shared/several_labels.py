"""Metrics of token classification and multi-label classification.

An entity is correct only if its type, start and end match (Sang 2002). Starts and ends
are determined as in conlleval and seqeval, even for invalid tag sequences, such as I-
without a preceding B-.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flatout.engine.tasks._task import IGNORED, Metrics

OUTSIDE, BEGIN, INSIDE, END, SINGLE = range(5)
PREFIXES = {"O": OUTSIDE, "B": BEGIN, "I": INSIDE, "E": END, "S": SINGLE}
TAG = re.compile(r"O|[BIES](-.+)?")


class Entities(Metrics):
    """Tag accuracy, and entity precision, recall and F1 as defined by seqeval."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.has_entities = all(TAG.fullmatch(name) for name in names)
        self._hits = torch.zeros(2, dtype=torch.int64, device=device)
        prefixes = [PREFIXES.get(name[0], OUTSIDE) for name in names]
        types = [name.partition("-")[2] for name in names]
        known = sorted({t for t, p in zip(types, prefixes, strict=True) if p})
        pairs = zip(types, prefixes, strict=True)
        numbers = [known.index(t) if p != OUTSIDE else -1 for t, p in pairs]
        self._prefixes = torch.tensor(prefixes, device=device)
        self._types = torch.tensor(numbers, device=device)
        size = max(1, len(known))
        self._counts = torch.zeros((3, size), dtype=torch.int64, device=device)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add the logits (k, C) and labels (k, 2) of complete rows."""
        # Tokens that do not begin a word would split entities, so move them to the end.
        order = (labels[:, 0] == IGNORED).to(torch.int8).argsort(stable=True)
        labels, predicted = labels[order], logits.argmax(-1)[order]
        tags, real = labels[:, 0], labels[:, 0] != IGNORED
        self._hits += torch.stack([((predicted == tags) & real).sum(), real.sum()])
        if not self.has_entities:
            return
        starts = (labels[:, 1] == 1) | ~real
        true = self._entities(tags.clamp(min=0), starts, real)
        given = self._entities(predicted, starts, real)
        same = torch.stack([a == b for a, b in zip(true, given, strict=True)]).all(0)
        for row, (types, chosen) in enumerate(
            ((true[1], true[0] & same), (given[1], given[0]), (true[1], true[0]))
        ):
            self._counts[row].index_add_(0, types.clamp(min=0), chosen.long())

    def _entities(
        self, tags: Tensor, starts: Tensor, real: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return three tensors (k,) for the `tags` (k,): whether an entity ends at the
        tag, the entity's type, and the position of its start."""
        prefix = self._prefixes[tags].where(real, OUTSIDE)
        types = self._types[tags].where(real, -1)
        # The positions before the first and after the last tag of a row have the tag O.
        before = prefix.roll(1).where(~starts, OUTSIDE)
        other = types.roll(1).where(~starts, -1) != types
        inside = prefix != OUTSIDE
        closed = (before == END) | (before == SINGLE) | (before == OUTSIDE)
        opens = (prefix == BEGIN) | (prefix == SINGLE)
        begins = inside & (opens | closed | other)
        last = torch.ones_like(starts)
        last[:-1] = starts[1:]
        after = prefix.roll(-1).where(~last, OUTSIDE)
        unlike = types.roll(-1).where(~last, -1) != types
        shut = (prefix == END) | (prefix == SINGLE)
        cut = (after == BEGIN) | (after == SINGLE) | (after == OUTSIDE)
        ends = inside & (shut | cut | unlike)
        places = torch.arange(len(tags), device=tags.device)
        began = places.where(begins, -1).cummax(0).values
        return ends, types, began

    def tensors(self) -> list[Tensor]:
        return [self._hits, self._counts]

    def compute(self) -> dict[str, Any]:
        """Return metrics in [0, 1]. Entity metrics require tags such as B-LOC."""
        hits, judged = self._hits.tolist()
        found = {"accuracy": hits / judged} if judged else {}
        if not self.has_entities:
            return found
        right, given, true = self._counts.sum(1).tolist()
        each = [f1_of(*one) for one in self._counts.T.tolist() if one[1] or one[2]]
        return found | {
            "f1": f1_of(right, given, true),
            "precision": right / given if given else 0.0,
            "recall": right / true if true else 0.0,
            "f1_macro": sum(each) / max(1, len(each)),
        }


class LabelCounts(Metrics):
    """F1 over labels, and the fraction of rows for which all labels are correct."""

    def __init__(
        self,
        num_labels: int,
        given: Callable[[Tensor], Tensor],
        device: torch.device,
    ) -> None:
        """`given` maps logits (k, L) to booleans (k, L) of predicted labels."""
        self._given = given
        self._counts = torch.zeros((3, num_labels), dtype=torch.int64, device=device)
        self._rows = torch.zeros(2, dtype=torch.int64, device=device)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add logits (k, L) and labels (k, L), which are 0, 1 or NaN (no target)."""
        real = ~labels.isnan().any(-1)
        true = labels == 1
        given = self._given(logits) & real.unsqueeze(-1)
        self._counts += torch.stack([(true & given).sum(0), given.sum(0), true.sum(0)])
        right = (true == given).all(-1) & real
        self._rows += torch.stack([right.sum(), real.sum()])

    def tensors(self) -> list[Tensor]:
        return [self._counts, self._rows]

    def compute(self) -> dict[str, Any]:
        """Return metrics in [0, 1], defined as in scikit-learn: `f1_micro` over all
        labels, `f1_macro` averaged over labels, and `accuracy` over whole rows."""
        right, rows = self._rows.tolist()
        counts = self._counts.tolist()
        each = [f1_of(*label) for label in zip(*counts, strict=True)]
        found = {
            "f1_micro": f1_of(*map(sum, counts)),
            "f1_macro": sum(each) / max(1, len(each)),
        }
        return found | ({"accuracy": right / rows} if rows else {})


def f1_of(right: int, given: int, true: int) -> float:
    """Return the F1 score, or 0 if no label is true or predicted."""
    return 2 * right / (given + true) if given + true else 0.0
