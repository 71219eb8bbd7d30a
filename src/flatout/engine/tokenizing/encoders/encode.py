"""Encode rows of texts as token rows on all CPU cores."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flatout.engine.data.row_facts import TEXT_HASH, text_hashes
from flatout.engine.files.arrow_folder import ArrowRecipe
from flatout.engine.files.content_key import ContentKey
from flatout.engine.machine.environment import tokenizer_parallelism
from flatout.engine.rows.token_facts import TokenFacts
from flatout.engine.tasks import IGNORED, RankedRows, Task, names_classes
from flatout.engine.tokenizing.encoders.encoded import (
    JOINED_SCHEMA,
    PAIRS_SCHEMA,
    PASSAGES,
    SCORED_SCHEMA,
    Encoded,
    TokensError,
    counts_of,
    join_blocks,
    lists_of,
    num_cut,
    pair_batch,
)
from flatout.engine.tokenizing.encoders.encoder import EncodeOptions, row_encoder
from flatout.engine.tokenizing.encoders.on_ray import encode_on_ray
from flatout.engine.tokenizing.tokenizer import TokenizerFile

logger = logging.getLogger(__name__)

UNIT_BYTES = 2 << 20
"""Number of bytes of text to encode at a time."""
UNIT_ROWS = 20_000
TEXTS = ("text", "text_pair", "completion", "messages")
"""Columns whose texts are encoded."""
WRITTEN = ("completion", "messages")
"""Forms of rows in which only some of the tokens are targets."""


@dataclass(frozen=True)
class TokensRecipe(ArrowRecipe):
    """Recipe of the token rows of one split."""

    key: ContentKey
    rows: Any
    """A `datasets.Dataset` with the column `text` and others such as `label`."""
    name: str
    tokenizer: TokenizerFile
    options: EncodeOptions
    task: Task
    mirror: str | None = None
    engine: str = "local"
    """The value of `tokenize.engine`."""
    _facts: dict[str, Any] = field(default_factory=dict, repr=False)

    def facts(self) -> dict[str, Any]:
        return self._facts

    @property
    def schema(self) -> Any:
        """Arrow schema of the token rows."""
        if self.options.join:
            return JOINED_SCHEMA
        if self.options.form == "pairs":
            is_scored = "label" in self.rows.column_names
            return SCORED_SCHEMA if is_scored else PAIRS_SCHEMA
        fields = [("input_ids", pa.list_(pa.int32()))]
        if self.makes_type_ids:
            fields.append(("token_type_ids", pa.list_(pa.int8())))
        if "label" in self.rows.column_names:
            fields.append(("labels", self.task.token_label_type()))
        elif self.options.form in WRITTEN:
            fields.append(("labels", pa.list_(pa.int32())))
        if names_classes(self.task.settings.task):
            fields.append((TEXT_HASH, pa.uint64()))
        return pa.schema([*fields, ("length", pa.int32())])

    @property
    def makes_type_ids(self) -> bool:
        """Return whether the two texts of a pair have different token type ids, both in
        the tokenizers library and in transformers."""
        if not (self.options.has_pair and self.tokenizer.gives_type_ids):
            return False
        return 1 in self.tokenizer.backend.encode("a", "b").type_ids

    def batches(self) -> Iterator[Any]:
        """Yield the token rows as RecordBatches, in order. Raises TokensError if labels
        or texts cannot be encoded."""
        started = time.perf_counter()
        self._check_labels()
        facts = TokenFacts()
        if self.options.join:
            parts = (part for *_, part in self._encode())
            batches = join_blocks(parts, self.options.max_length)
        elif self.options.form == "pairs":
            batches = self._pair_batches()
        else:
            batches = self._row_batches()
        for batch in batches:
            facts.add(batch)
            yield batch
        self._facts.update(facts.as_dict())
        self._facts["vocabulary"] = self.tokenizer.vocabulary_digest
        elapsed_s = time.perf_counter() - started
        rows, rate = len(self.rows), len(self.rows) / max(elapsed_s, 1e-9)
        logger.info("%s: %s rows, %s rows/s", self.name, f"{rows:,}", f"{rate:,.0f}")

    def _row_batches(self) -> Iterator[Any]:
        cut = targets_seen = 0
        for start, stop, part in self._encode():
            columns = [lists_of(part.ids, part.lengths)]
            if part.type_ids is not None and "token_type_ids" in self.schema.names:
                columns.append(lists_of(part.type_ids, part.lengths))
            if self.options.form in WRITTEN and part.marks is not None:
                labels = np.where(part.marks >= 0, part.ids, IGNORED).astype(np.int32)
                columns.append(lists_of(labels, part.lengths))
                targets_seen += int((part.marks >= 0).sum())
            if (targets := self._targets(start, stop)) is not None:
                columns.append(_spread(targets, part))
            if TEXT_HASH in self.schema.names:
                texts = self.rows.data.table.slice(start, stop - start)
                columns.append(pa.array(text_hashes(texts)))
            columns.append(pa.array(part.lengths))
            cut += int(part.cut.sum())
            self._facts["cut_rows"] = cut
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)
        if self.options.form in WRITTEN and len(self.rows) and not targets_seen:
            raise TokensError(
                f"{self.name}: no row has a token of its completion within "
                f"tokenize.max_length {self.options.max_length}: raise it"
            )

    def _pair_batches(self) -> Iterator[Any]:
        table, cut = self.rows.data.table, 0
        for start, stop, part in self._encode():
            counts = counts_of(table.slice(start, stop - start))
            cut += num_cut(part, counts)
            self._facts["cut_rows"] = cut
            yield pair_batch(part, counts, self._targets(start, stop))

    def _encode(self) -> Iterator[tuple[int, int, Encoded]]:
        """Encode rows in parts to limit memory use. For each part, yield the index of
        its first row, the index after its last row, and its tokens."""
        table, own = self.rows.data.table, (*TEXTS, PASSAGES)
        texts = table.select([name for name in own if name in table.column_names])
        size = max(1, min(UNIT_ROWS, UNIT_BYTES * len(texts) // max(1, texts.nbytes)))
        starts = range(0, len(texts), size)
        parts = ((texts.slice(start, size), start) for start in starts)
        encoded = self._encode_here(parts)
        if self.engine == "ray":
            encoded = encode_on_ray(parts, self.tokenizer, self.options)
        for start, part in zip(starts, encoded, strict=True):
            yield start, min(start + size, len(texts)), part

    def _encode_here(self, parts: Iterator[tuple[Any, int]]) -> Iterator[Encoded]:
        encode = row_encoder(self.tokenizer, self.options)
        for part in parts:
            with tokenizer_parallelism(True):
                yield encode(*part)

    def _check_labels(self) -> None:
        if "label" not in self.rows.column_names:
            return
        labels = self.rows.data.table.column("label")
        fault = self.task.label_fault(labels)
        if self.options.form == "words" and fault is None:
            fault = _words_fault(self.rows.data.table.column("text"), labels)
        if fault:
            raise TokensError(f"{self.name}: {fault}")

    def _targets(self, start: int, stop: int) -> Any | None:
        """Return the encoded labels of rows `start` to `stop` as an Arrow array, or
        None if there are no labels. Labels are encoded in parts, because all of them
        together could exceed the maximum size of an Arrow array."""
        if "label" not in self.rows.column_names:
            return None
        label = self.rows.data.table.column("label").slice(start, stop - start)
        if isinstance(self.task, RankedRows):
            return self.task.encode_ranked(label, self._queries[start:stop])
        return self.task.encode_labels(label).combine_chunks()

    @cached_property
    def _queries(self) -> npt.NDArray[np.int32]:
        """Integer code of each row's query (N,). The query is the row's first text."""
        encoded = self.rows.data.table.column("text").dictionary_encode()
        return np.concatenate([part.indices.to_numpy() for part in encoded.chunks])


def _words_fault(texts: Any, tags: Any) -> str | None:
    """Return an error message if a row does not have exactly one tag per word."""
    words = pc.add(pc.count_substring(texts, " "), 1)
    counts = pc.fill_null(pc.list_value_length(tags), 0)
    odd = pc.not_equal(words, counts)
    if not pc.sum(odd).as_py():
        return None
    row = pc.index(odd, True).as_py()
    return (
        f"row {row} has {words[row].as_py()} words and {counts[row].as_py()} tags: the "
        "rows were split for another task. Run kedro run --pipelines=split,tokenize"
    )


def _spread(targets: Any, part: Encoded) -> Any:
    """Return the targets of N rows. For rows of words, lists with a label per word
    become lists with a label per token: the first token of a word gets the word's
    label, and all other tokens get IGNORED."""
    if part.marks is None:
        return targets
    chosen = part.marks >= 0
    rows = np.repeat(np.arange(len(part.lengths)), part.lengths)[chosen]
    labels = np.full(len(part.marks), IGNORED, np.int32)
    places = targets.offsets.to_numpy()[rows] + part.marks[chosen]
    labels[chosen] = targets.values.to_numpy()[places]
    return lists_of(labels, part.lengths)
