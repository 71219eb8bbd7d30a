"""A saved model applied to texts: a row of predictions for every row, in order.

Rows are read, predicted and handed on a window at a time, so that memory does not
grow with the file. A row that cannot be used keeps its place, with the reason.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from flatout.engine.data.raw_texts import RawTexts, open_raw_texts
from flatout.engine.parameters import PredictSettings, Settings
from flatout.engine.predict.predictor import Predictor
from flatout.engine.predict.text_encoder import TextEncoder
from flatout.engine.predict.text_windows import (
    check_columns,
    text_windows,
    window_schema,
)
from flatout.engine.rows.tokens import TokenRows
from flatout.engine.tokenizing.tokenizer import TokenizerFile

logger = logging.getLogger(__name__)

SHOWN_REASONS = 5


@dataclass(frozen=True)
class Predictions:
    """Recipe of a table: source, row; id and texts as there are; label, score and a
    probability a class, or value; reason. Carried out by reading `batches` once."""

    texts: RawTexts
    predictor: Predictor
    encoder: TextEncoder
    settings: PredictSettings

    @property
    def schema(self) -> Any:
        window = window_schema(self.settings)
        taken = [f for f in window if self.settings.keep_text or not _is_text(f.name)]
        return pa.schema([*taken[:-1], *self.predictor.task.answer_fields(), taken[-1]])

    def batches(self) -> Iterator[Any]:
        """A RecordBatch a window, rows in their order."""
        started, rows, reasons = time.perf_counter(), 0, Counter[str]()
        for window, tokens in self.predictor.ahead(self._encoded_windows()):
            rows += window.num_rows
            reasons.update(window.column("reason").drop_null().to_pylist())
            yield self._answers(window, tokens)
        log_rate(self.predictor, rows, time.perf_counter() - started, reasons)

    def _encoded_windows(self) -> Iterator[tuple[Any, TokenRows | None]]:
        """Windows, each with the token rows of its usable texts."""
        for window in text_windows(
            self.texts, self.settings, self.predictor.task.row_form
        ):
            good = window.filter(window.column("reason").is_null()).combine_chunks()
            columns = [good.column(n) for n in good.column_names if _is_text(n)]
            texts = [column.combine_chunks() for column in columns]
            yield window, self.encoder.encode(*texts) if good.num_rows else None

    def _answers(self, window: Any, tokens: TokenRows | None) -> Any:
        usable = window.column("reason").is_null().to_numpy()
        named = {name: window.column(name) for name in window.column_names}
        answers: Mapping[str, Any] = {}
        if tokens is not None:
            logits = self.predictor.logits(tokens)
            answers = self.predictor.task.row_answers(logits, tokens)
        # Number of each row's answer; null where it has none.
        place = pa.array(np.cumsum(usable) - 1, mask=~usable)
        for field in self.predictor.task.answer_fields():
            column = pa.array(answers.get(field.name, []), field.type)
            named[field.name] = column.take(place)
        table = pa.table(
            [named[name] for name in self.schema.names], schema=self.schema
        )
        return table.combine_chunks().to_batches()[0]


def predict(
    model: Any, tokenizer: TokenizerFile, texts: Any, settings: Settings
) -> Predictions:
    """What `model` (of `from_pretrained`) says of `texts` (anything that
    `open_raw_texts` opens). Raises ModelError, RawTextsError, SettingsError."""
    raw = open_raw_texts(texts, "predict_texts")
    settings = settings.model_copy(update={"predict": _with_columns(raw, settings)})
    check_columns(raw, settings.predict)
    predictor = Predictor(model, tokenizer, settings)
    encoder = TextEncoder(predictor, model, tokenizer)
    return Predictions(raw, predictor, encoder, settings.predict)


def _with_columns(raw: RawTexts, settings: Settings) -> PredictSettings:
    """Columns of the texts: the named ones; else those of split, or those that split
    writes where these are its rows."""
    chosen, split, present = settings.predict, settings.split, raw.column_names
    columns = {}
    for key, written in (("text_column", "text"), ("text_pair_column", "text_pair")):
        column, found = getattr(chosen, key), f"predict.{key}"
        if column is None:
            column, found = getattr(split, key), f"split.{key}"
            if column is not None and column not in present and written in present:
                column, found = written, "as split writes it"
        if column is not None:
            logger.info("predict_texts: column %r (%s)", column, found)
        columns[key] = column
    return chosen.model_copy(update=columns)


def _is_text(name: str) -> bool:
    return name in ("text", "text_pair")


def log_rate(
    predictor: Predictor, rows: int, elapsed_s: float, reasons: Counter[str]
) -> None:
    rate = rows / max(elapsed_s, 1e-9)
    logger.info(
        "%s rows predicted, %s rows/s (%s, %s, %s)",
        f"{rows - reasons.total():,}",
        f"{rate:,.0f}",
        predictor.runtime.device_name,
        predictor.runtime.precision,
        predictor.strategy,
    )
    if reasons:
        told = [f"{text} ({n:,})" for text, n in reasons.most_common(SHOWN_REASONS)]
        logger.warning(
            "%s of %s rows have no prediction; column reason says why: %s",
            f"{reasons.total():,}",
            f"{rows:,}",
            ", ".join(told),
        )
