"""Token rows, encoded on all cores."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flatout.engine.files.arrow_folder import ArrowRecipe
from flatout.engine.files.content_key import ContentKey
from flatout.engine.machine.environment import tokenizer_parallelism
from flatout.engine.machine.workers import run_in_order
from flatout.engine.parameters import Auto
from flatout.engine.rows.token_facts import TokenFacts
from flatout.engine.tasks import IGNORED, Task
from flatout.engine.tokenizing.encoders.chat import ChatEncoder
from flatout.engine.tokenizing.encoders.encode_tasks import (
    Slice,
    choose_processes,
    plan_tasks,
    row_files,
)
from flatout.engine.tokenizing.encoders.encoded import Encoded, TokensError
from flatout.engine.tokenizing.encoders.encoding import Encoder, encode_slice, read_rows
from flatout.engine.tokenizing.encoders.joining import JOINED_SCHEMA, join_blocks
from flatout.engine.tokenizing.encoders.plain_encoder import EncodeOptions
from flatout.engine.tokenizing.tokenizer import TokenizerFile

logger = logging.getLogger(__name__)

MEASURED_TASKS = 2
WRITTEN = ("completion", "messages")
"""Forms of rows of which a part is learnt."""


@dataclass(frozen=True)
class TokensRecipe(ArrowRecipe):
    """How to make the token rows of one split."""

    key: ContentKey
    rows: Any
    """`datasets.Dataset` with `text`, and `text_pair` and `label` as there are."""
    name: str
    tokenizer: TokenizerFile
    options: EncodeOptions
    task: Task
    num_processes: int | Auto
    _facts: dict[str, Any] = field(default_factory=dict, repr=False)

    def facts(self) -> dict[str, Any]:
        return self._facts

    @property
    def schema(self) -> Any:
        """Columns of the token rows."""
        if self.options.join:
            return JOINED_SCHEMA
        fields = [("input_ids", pa.list_(pa.int32()))]
        if self.makes_type_ids:
            fields.append(("token_type_ids", pa.list_(pa.int8())))
        if "label" in self.rows.column_names:
            fields.append(("labels", self.task.token_label_type()))
        elif self.options.form in WRITTEN:
            fields.append(("labels", pa.list_(pa.int32())))
        return pa.schema([*fields, ("length", pa.int32())])

    @property
    def makes_type_ids(self) -> bool:
        """Whether the tokenizer tells the two texts of a pair apart, here and in
        transformers."""
        if not (self.options.has_pair and self.tokenizer.gives_type_ids):
            return False
        return 1 in self.tokenizer.backend.encode("a", "b").type_ids

    def batches(self) -> Iterator[Any]:
        """RecordBatches in the order of the rows. Raises TokensError."""
        started = time.perf_counter()
        self._check_labels()
        with row_files(self.rows) as files:
            tasks = [task for file in files for task in plan_tasks(file, self.options)]
            encoded = self._encode(tasks)
            if self.options.join:
                batches = join_blocks(encoded, self.options.max_length)
            else:
                batches = self._row_batches(encoded)
            facts = TokenFacts()
            for batch in batches:
                facts.add(batch)
                yield batch
            self._facts.update(facts.as_dict())
            self._facts["vocabulary"] = self.tokenizer.vocabulary_digest
        elapsed_s = time.perf_counter() - started
        rows, rate = len(self.rows), len(self.rows) / max(elapsed_s, 1e-9)
        logger.info("%s: %s rows, %s rows/s", self.name, f"{rows:,}", f"{rate:,.0f}")

    def _row_batches(self, encoded: Iterator[Encoded]) -> Iterator[Any]:
        start = cut = targets_seen = 0
        for part in encoded:
            stop = start + len(part.lengths)
            columns = [_lists(part.ids, part.lengths)]
            if part.type_ids is not None and "token_type_ids" in self.schema.names:
                columns.append(_lists(part.type_ids, part.lengths))
            if self.options.form in WRITTEN and part.marks is not None:
                labels = np.where(part.marks >= 0, part.ids, IGNORED).astype(np.int32)
                columns.append(_lists(labels, part.lengths))
                targets_seen += int((part.marks >= 0).sum())
            if (targets := self._targets(start, stop)) is not None:
                columns.append(self._spread(targets, part))
            columns.append(pa.array(part.lengths))
            start, cut = stop, cut + int(part.cut.sum())
            self._facts["cut_rows"] = cut
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)
        if self.options.form in WRITTEN and start and not targets_seen:
            raise TokensError(
                f"{self.name}: no row has a token of its completion within "
                f"tokenize.max_length {self.options.max_length}: raise it"
            )

    def _spread(self, targets: Any, part: Encoded) -> Any:
        """Targets of rows; of words as a list a token."""
        if part.marks is None:
            return targets
        labels = _spread_words(targets, part.lengths, part.marks)
        return _lists(labels, part.lengths)

    def _encode(self, tasks: list[Slice]) -> Iterator[Encoded]:
        """The first tasks here, to measure; the others where they are done first. The
        last one measured counts, since the first meets all words for the first time."""
        if self.options.form == "messages":
            yield from self._encode_chats(tasks)
            return
        encoder = Encoder(self.tokenizer.backend, self.options)
        tables = {file: read_rows(file) for file in dict.fromkeys(t[0] for t in tasks)}
        task_s = 0.0
        for task in tasks[:MEASURED_TASKS]:
            started = time.perf_counter()
            part = _encode_task(encoder, tables, task, on_all_cores=False)
            task_s = time.perf_counter() - started
            yield part
        rest = tasks[MEASURED_TASKS:]
        processes = self.num_processes
        if processes == "auto":
            processes = choose_processes(task_s, len(rest), encoder.knows_words)
        if processes > 1:
            yield from self._encode_elsewhere(rest, processes)
            return
        for task in rest:
            yield _encode_task(encoder, tables, task, on_all_cores=True)

    def _encode_chats(self, tasks: list[Slice]) -> Iterator[Encoded]:
        chats = ChatEncoder(self.tokenizer.folder, self.options.max_length)
        first = 0
        for file, start, stop in tasks:
            column = read_rows(file).column("messages").slice(start, stop - start)
            yield chats.encode(column, first)
            first += stop - start

    def _encode_elsewhere(
        self, tasks: list[Slice], processes: int
    ) -> Iterator[Encoded]:
        setup = {"tokenizer": str(self.tokenizer.path), "options": asdict(self.options)}
        answers = run_in_order(
            "flatout.engine.tokenizing.encoders.encoding", setup, tasks, processes
        )
        return map(Encoded.from_bytes, answers)

    def _check_labels(self) -> None:
        """Raises TokensError where a label cannot be learnt."""
        if "label" not in self.rows.column_names:
            return
        labels = self.rows.data.table.column("label")
        fault = self.task.label_fault(labels)
        if self.options.form == "words" and fault is None:
            fault = _words_fault(self.rows.data.table.column("text"), labels)
        if fault:
            raise TokensError(f"{self.name}: {fault}")

    def _targets(self, start: int, stop: int) -> Any | None:
        """Targets of rows `start` to `stop` as Arrow; None for language models. A part
        at a time: all names joined to one array may be larger than it can hold."""
        if "label" not in self.rows.column_names:
            return None
        label = self.rows.data.table.column("label").slice(start, stop - start)
        return self.task.encode_labels(label).combine_chunks()


def _words_fault(texts: Any, tags: Any) -> str | None:
    """Rows that split made for another task have no tag for each word."""
    words = pc.add(pc.count_substring(texts, " "), 1)
    odd = pc.not_equal(words, pc.list_value_length(tags))
    if not pc.sum(odd).as_py():
        return None
    row = pc.index(odd, True).as_py()
    return (
        f"row {row} has {words[row].as_py()} words and {len(tags[row])} tags: the rows "
        "were split for another task. Run kedro run --pipelines=split,tokenize"
    )


def _spread_words(
    targets: Any, lengths: npt.NDArray[np.int32], marks: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """Lists (N,) of a number a word -> (T,) a number a token, at words' first pieces:
    `marks` (T,) are the numbers of these words."""
    chosen = marks >= 0
    rows = np.repeat(np.arange(len(lengths)), lengths)[chosen]
    labels = np.full(len(marks), IGNORED, np.int32)
    places = targets.offsets.to_numpy()[rows] + marks[chosen]
    labels[chosen] = targets.values.to_numpy()[places]
    return labels


def _encode_task(
    encoder: Encoder, tables: dict[str, Any], task: Slice, on_all_cores: bool
) -> Encoded:
    file, start, stop = task
    with tokenizer_parallelism(on_all_cores):
        return encode_slice(encoder, tables[file], start, stop)


def _lists(values: npt.NDArray[Any], lengths: npt.NDArray[np.int32]) -> Any:
    """List column over `values` (T,), without a copy."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
