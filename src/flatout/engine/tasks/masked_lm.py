"""Masked language modelling (Devlin et al. 2018)."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.engine.rows.layout import Ints
from flatout.engine.rows.rows import Rows
from flatout.engine.rows.vocabulary import Vocabulary
from flatout.engine.tasks._shared.cross_entropy import Pieces
from flatout.engine.tasks._task import HeadKind, Targets, TaskError, Texts

NO_MASK = "model.task is masked-lm, and this tokenizer has no mask token"


class MaskedLM(Pieces):
    """Predict a fixed fraction of the tokens in each row. Of these tokens, 80 % are
    replaced by [MASK], 10 % by a random token, and 10 % are kept, as in BERT's
    create_pretraining_data.py. Unlike in BERT, random tokens are never special."""

    auto_class = "AutoModelForMaskedLM"
    architectures = ("ForMaskedLM",)
    head_kind = HeadKind.VOCABULARY
    texts = Texts(joined=True)
    pipeline_tag = "fill-mask"

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Raises TaskError if the tokenizer has no mask token."""
        super().__init__(*arguments, **named)
        if self.vocabulary is not None and self.vocabulary.mask_token_id is None:
            raise TaskError(NO_MASK)

    @property
    def targets_per_token(self) -> float:  # type: ignore[override]
        return self.settings.mask_probability

    def tokenizer_fault(self, tokenizer: Any) -> str | None:
        return NO_MASK if tokenizer.mask_token is None else None

    def targets(
        self, rows: Rows, row_ids: Ints, epoch: int, *, pools_last: bool
    ) -> Targets:
        """Return masked copies of the rows, with the positions and tokens of
        targets."""
        views = zip(rows.views(row_ids), row_ids.tolist(), strict=True)
        masked = [self._mask(ids, rows.place_of(row), epoch) for ids, row in views]
        values, places, labels = zip(*masked, strict=True) if masked else ((), (), ())
        return Targets(places, labels, values)

    def num_targets(self, rows: Rows, row_ids: Ints, epoch: int) -> int:
        """Return the number of targets, a fixed fraction of the non-special tokens."""
        views = rows.views(row_ids)
        return sum(self._mask_count(len(self._candidates(view))) for view in views)

    def _candidates(self, ids: npt.NDArray[Any]) -> Ints:
        """Return the positions (C,) of the tokens that are not special."""
        return np.flatnonzero(~np.isin(ids, self._special))

    def _mask_count(self, candidates: int) -> int:
        share = self.settings.mask_probability
        return min(candidates, max(1, round(share * candidates)))

    def _mask(
        self, ids: npt.NDArray[Any], row: tuple[int, ...], epoch: int
    ) -> tuple[Any, Any, Any]:
        """Return a masked copy of a row, and the positions and original tokens of its
        targets. The result depends only on seed, epoch and `row` (`Rows.place_of`)."""
        rng = np.random.default_rng([self.seed, epoch, *row])
        candidates = self._candidates(ids)
        count = self._mask_count(len(candidates))
        places = np.sort(rng.choice(candidates, count, replace=False))
        chance = rng.random(count)
        masked = ids.copy()
        masked[places[chance < 0.8]] = self._known.mask_token_id
        random_places = places[chance >= 0.9]
        masked[random_places] = self._random_pieces(rng, len(random_places))
        return masked, places, ids[places]

    @property
    def _known(self) -> Vocabulary:
        if self.vocabulary is None:
            raise TaskError("masked-lm needs a vocabulary to create its targets")
        return self.vocabulary

    @cached_property
    def _special(self) -> Ints:
        return np.array(self._known.special_token_ids, dtype=np.int64)

    def _random_pieces(self, rng: np.random.Generator, count: int) -> Ints:
        """Draw `count` token ids uniformly from all non-special tokens. Special tokens
        such as padding are excluded, because RoBERTa assigns no position to padding."""
        # The number of non-special ids below each special id, in ascending order.
        below = self._special - np.arange(len(self._special))
        drawn = rng.integers(0, self._known.size - len(below), count)
        # Shift each draw by the number of special ids up to it.
        return drawn + np.searchsorted(below, drawn, side="right")
