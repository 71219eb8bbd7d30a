"""A saved model applied to texts: a row of predictions for every row, in order.

Rows are read, predicted and handed on a window at a time, so that memory does not
grow with the file. A row that cannot be used keeps its place, with the reason.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.data.raw_texts import RawTexts, open_raw_texts
from flatout.engine.data.text_windows import (
    check_columns,
    text_windows,
    window_schema,
)
from flatout.engine.predictor import Predictor
from flatout.engine.settings import PredictSettings, Settings
from flatout.engine.tokenizing.tokenizer import TokenizerFile
from flatout.engine.tokens import TokenRows

logger = logging.getLogger(__name__)

SHOWN_REASONS = 5


@dataclass(frozen=True)
class Predictions:
    """Recipe of a table: source, row, id as there is one; label, score and a
    probability a class, or value; reason. Carried out by reading `batches` once."""

    texts: RawTexts
    predictor: Predictor
    settings: PredictSettings

    @property
    def schema(self) -> Any:
        taken = [f for f in window_schema(self.settings) if not _is_text(f.name)]
        names = self.predictor.label_names
        if self.predictor.task == "regression":
            answers = {"value": pa.float32()}
        else:
            answers = {"label": pa.string(), "score": pa.float32()}
            answers |= {f"probability_{name}": pa.float32() for name in names}
        fields = [pa.field(name, kind) for name, kind in answers.items()]
        return pa.schema([*taken[:-1], *fields, taken[-1]])

    def batches(self) -> Iterator[Any]:
        """A RecordBatch a window, rows in their order."""
        started, rows, reasons = time.perf_counter(), 0, Counter[str]()
        for window, tokens in self.predictor.ahead(self._encoded_windows()):
            rows += window.num_rows
            reasons.update(window.column("reason").drop_null().to_pylist())
            yield self._answers(window, tokens)
        _log(self.predictor, rows, time.perf_counter() - started, reasons)

    def _encoded_windows(self) -> Iterator[tuple[Any, TokenRows | None]]:
        """Windows, each with the token rows of its usable texts."""
        for window in text_windows(self.texts, self.settings):
            good = window.filter(window.column("reason").is_null()).combine_chunks()
            columns = [good.column(n) for n in good.column_names if _is_text(n)]
            texts = [column.combine_chunks() for column in columns]
            yield window, self.predictor.encode(*texts) if good.num_rows else None

    def _answers(self, window: Any, tokens: TokenRows | None) -> Any:
        usable = window.column("reason").is_null().to_numpy()
        width = len(self.predictor.label_names)
        logits = np.full((window.num_rows, width), np.nan, np.float32)
        if tokens is not None:
            logits[usable] = self.predictor.logits(tokens)
        named = {n: window.column(n) for n in window.column_names if not _is_text(n)}
        if self.predictor.task == "regression":
            named["value"] = _nullable(logits[:, 0], usable)
        else:
            named |= self._classes(logits, usable)
        table = pa.table(
            [named[name] for name in self.schema.names], schema=self.schema
        )
        return table.combine_chunks().to_batches()[0]

    def _classes(
        self, logits: npt.NDArray[np.float32], usable: npt.NDArray[np.bool_]
    ) -> dict[str, Any]:
        """Label, score, probabilities of logits (N, classes); null where unusable."""
        names, shares = self.predictor.label_names, softmax(logits)
        best = np.where(usable, shares.argmax(1), 0)
        label = pa.array(names, pa.string()).take(pa.array(best, mask=~usable))
        return {
            "label": label,
            "score": _nullable(shares[np.arange(len(best)), best], usable),
            **{
                f"probability_{name}": _nullable(shares[:, index], usable)
                for index, name in enumerate(names)
            },
        }


def predict(
    model: Any, tokenizer: TokenizerFile, texts: Any, settings: Settings
) -> Predictions:
    """What `model` (of `from_pretrained`) says of `texts` (anything that
    `open_raw_texts` opens). Raises ModelError, RawTextsError, SettingsError."""
    raw = open_raw_texts(texts, "predict_texts")
    check_columns(raw, settings.predict)
    return Predictions(raw, Predictor(model, tokenizer, settings), settings.predict)


def softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Over the last axis, shifted so that nothing overflows."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    result: npt.NDArray[np.float32] = powers / powers.sum(-1, keepdims=True)
    return result


def _is_text(name: str) -> bool:
    return name in ("text", "text_pair")


def _nullable(values: npt.NDArray[Any], usable: npt.NDArray[np.bool_]) -> Any:
    return pa.array(values, mask=~usable)


def _log(
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
