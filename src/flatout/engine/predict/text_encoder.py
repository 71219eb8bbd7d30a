"""Texts as the rows of tokens that a saved model reads."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flatout.engine.machine.environment import tokenizer_parallelism
from flatout.engine.predict.predictor import Predictor
from flatout.engine.rows.tokens import TokenRows
from flatout.engine.tokenizing.encoders.encode import lists_of
from flatout.engine.tokenizing.encoders.encoder import EncodeOptions, Encoder
from flatout.engine.tokenizing.token_recipes import empty_text_id
from flatout.engine.tokenizing.tokenizer import TokenizerFile


class TextEncoder:
    """Encodes texts according to a predictor and its settings."""

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
        """Return token rows of N texts (and N second texts), Arrow, without nulls."""
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
            # One unused target per row.
            labels = pa.array(np.zeros(len(lengths), np.int64))
        return TokenRows(pa.table({**lists, "labels": labels}))
