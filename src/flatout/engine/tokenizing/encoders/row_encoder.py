"""The function that encodes rows, by their form; also run by other machines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flatout.engine.tokenizing.encoders.chat import ChatEncoder
from flatout.engine.tokenizing.encoders.encoded import Encoded
from flatout.engine.tokenizing.encoders.encoder import EncodeOptions, Encoder
from flatout.engine.tokenizing.encoders.pairs import texts_of
from flatout.engine.tokenizing.tokenizer import TokenizerFile

RowEncoder = Callable[[Any, int], Encoded]
"""(table of rows, number of the first row) -> their tokens."""


def row_encoder(tokenizer: TokenizerFile, options: EncodeOptions) -> RowEncoder:
    if options.form == "messages":
        chats = ChatEncoder(tokenizer.folder, options.max_length)
        return lambda part, start: chats.encode(_column(part, "messages"), start)
    encoder = Encoder(tokenizer.backend, options)
    if options.form == "pairs":
        return lambda part, _: encoder.encode(texts_of(part))
    second = "completion" if options.form == "completion" else "text_pair"
    return lambda part, _: encoder.encode(
        _column(part, "text"),
        _column(part, second) if second in part.column_names else None,
    )


def _column(table: Any, name: str) -> Any:
    return table.column(name).combine_chunks()
