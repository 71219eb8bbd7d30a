"""Read the texts for prediction in windows, and encode them.

Windows contain every row. If a row cannot be used, its column `reason` states why.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flatout.engine.data.column_checks import Faults, read_text
from flatout.engine.data.columns import column_faults, listed
from flatout.engine.data.forms import read_words
from flatout.engine.data.raw_texts import (
    BATCH_BYTES,
    RawBatch,
    RawTexts,
    RawTextsError,
)
from flatout.engine.data.rows import with_broken_rows
from flatout.engine.machine.environment import tokenizer_parallelism
from flatout.engine.parameters import PredictSettings
from flatout.engine.predict.predictor import Predictor
from flatout.engine.rows.tokens import TokenRows
from flatout.engine.tokenizing.encoders.encoded import lists_of
from flatout.engine.tokenizing.encoders.encoder import EncodeOptions, Encoder
from flatout.engine.tokenizing.token_recipes import empty_text_id
from flatout.engine.tokenizing.tokenizer import TokenizerFile


def text_windows(
    raw: RawTexts, settings: PredictSettings, form: str = "text"
) -> Iterator[Any]:
    """Yield all rows of `raw`, in order, as tables with the schema `window_schema` and
    at most `window_rows` rows (fewer if rows are large). The texts of rejected
    rows are null. `form` is the task's `Texts.form`."""
    pending = window_schema(settings).empty_table()
    names = (settings.text_column, settings.text_pair_column, settings.id_column)
    for batch in raw.batches([*dict.fromkeys(filter(None, names))]):
        pending = pa.concat_tables([pending, _checked(batch, settings, form)])
        while pending.num_rows >= settings.window_rows or pending.nbytes > BATCH_BYTES:
            yield pending.slice(0, settings.window_rows).combine_chunks()
            pending = pending.slice(settings.window_rows)
    if pending.num_rows:
        yield pending.combine_chunks()


def window_schema(settings: PredictSettings) -> Any:
    """Return the Arrow schema of a window. The columns `id` and `text_pair` are present
    only if the settings name their source columns."""
    fields = [("source", pa.string()), ("row", pa.int64())]
    fields += [("id", pa.string())] if settings.id_column else []
    fields += [("text", pa.string())]
    fields += [("text_pair", pa.string())] if settings.text_pair_column else []
    return pa.schema([*fields, ("reason", pa.string())])


def reject_rows(window: Any, faults: Mapping[int, str]) -> Any:
    """Return `window` with reasons added for unusable rows. `faults` maps row indices
    to reasons. These indices count only rows that have no reason yet."""
    places = np.flatnonzero(window.column("reason").is_null().to_numpy())
    reasons = np.array(window.column("reason").to_pylist(), dtype=object)
    reasons[places[[*faults]]] = [*faults.values()]
    kept = window.drop_columns("reason")
    return kept.append_column("reason", pa.array(reasons, pa.string()))


def check_columns(raw: RawTexts, settings: PredictSettings) -> None:
    """Raise RawTextsError if `raw` lacks a column that the settings name."""
    keys = ("text_column", "text_pair_column", "id_column")
    wanted = {f"predict.{key}": getattr(settings, key) for key in keys}
    if faults := column_faults(raw.column_names, wanted, "predict_texts"):
        present = listed(raw.column_names)
        raise RawTextsError(f"predict_texts has the columns {present}. {faults}")


def _checked(given: RawBatch, settings: PredictSettings, form: str) -> Any:
    """Return all rows of a batch, including unreadable ones, as a table of
    `window_schema`."""
    batch, broken = with_broken_rows(given)
    faults, read = Faults(), read_words if form == "words" else read_text
    texts = {"text": read(batch, str(settings.text_column), faults)}
    if pair := settings.text_pair_column:
        texts["text_pair"] = read(batch, pair, faults)
    reasons = {row: why for row, (_, why) in faults.reasons.items()} | broken
    reason = pa.array(map(reasons.get, range(len(batch.rows))), pa.string())
    arrays = {
        "source": pa.repeat(batch.source, len(batch.rows)),
        "row": pa.array(batch.rows),
        **({"id": _id_of(batch, settings.id_column)} if settings.id_column else {}),
        **{n: pc.if_else(reason.is_null(), t, None) for n, t in texts.items()},
        "reason": reason,
    }
    return pa.table(arrays, schema=window_schema(settings))


def _id_of(batch: RawBatch, name: str) -> Any:
    try:
        return batch.columns[name].cast(pa.string())
    except pa.ArrowException as error:
        kind = batch.columns[name].type
        raise RawTextsError(
            f"predict.id_column: {name!r} of predict_texts is {kind}, which has no "
            "form as text; choose a column of texts or numbers, or null"
        ) from error


class TextEncoder:
    """Encodes texts as token rows for `predictor`, truncated to its maximum length."""

    def __init__(
        self, predictor: Predictor, model: Any, tokenizer: TokenizerFile
    ) -> None:
        options = EncodeOptions(
            max_length=predictor.max_length,
            has_pair=predictor.settings.text_pair_column is not None,
            form=predictor.task.texts.form,
            empty_id=empty_text_id(tokenizer),
            whole_ends=predictor.task.texts.predicts_neighbours,
        )
        self._encoder = Encoder(tokenizer.backend, options)
        parameters = inspect.signature(model.forward).parameters
        self._takes_type_ids = (
            "token_type_ids" in parameters and tokenizer.gives_type_ids
        )

    def encode(self, texts: Any, pairs: Any | None = None) -> TokenRows:
        """Return the token rows of N texts and, optionally, N second texts. Both are
        Arrow arrays without nulls."""
        with tokenizer_parallelism(True):
            encoded = self._encoder.encode(texts, pairs)
        lengths = encoded.lengths
        lists = {"input_ids": lists_of(encoded.ids, lengths)}
        if self._takes_type_ids and encoded.type_ids is not None:
            lists["token_type_ids"] = lists_of(encoded.type_ids, lengths)
        if encoded.marks is not None:
            lists["num_words"] = pc.add(pc.count_substring(texts, " "), 1)
            labels = lists_of(encoded.marks, lengths)
        else:
            # Each row needs a label, but its value is not used.
            labels = pa.array(np.zeros(len(lengths), np.int64))
        return TokenRows(pa.table({**lists, "labels": labels}))
