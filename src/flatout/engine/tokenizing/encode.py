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

from flatout.engine.data.arrow_folder import ArrowRecipe
from flatout.engine.data.content_key import ContentKey
from flatout.engine.data.workers import run_in_order
from flatout.engine.environment import tokenizer_parallelism
from flatout.engine.settings import Auto
from flatout.engine.tokenizing.encode_tasks import (
    Task,
    choose_processes,
    plan_tasks,
    row_files,
)
from flatout.engine.tokenizing.encoded import Encoded
from flatout.engine.tokenizing.encoding import Encoder, encode_slice, read_rows
from flatout.engine.tokenizing.joining import JOINED_SCHEMA, join_blocks
from flatout.engine.tokenizing.plain_encoder import EncodeOptions
from flatout.engine.tokenizing.tokenizer import TokenizerFile

logger = logging.getLogger(__name__)

MEASURED_TASKS = 2


class TokensError(ValueError):
    """Rows that cannot become token rows; says which and what to do."""


@dataclass(frozen=True)
class TokensRecipe(ArrowRecipe):
    """How to make the token rows of one split."""

    key: ContentKey
    rows: Any
    """`datasets.Dataset` with `text`, and `text_pair` and `label` as there are."""
    name: str
    tokenizer: TokenizerFile
    options: EncodeOptions
    label_names: list[str] | None
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
            fields.append(("labels", pa.float64() if self._regression else pa.int64()))
        return pa.schema([*fields, ("length", pa.int32())])

    @property
    def _regression(self) -> bool:
        return self.label_names is None

    @property
    def makes_type_ids(self) -> bool:
        """Whether the tokenizer tells the two texts of a pair apart."""
        if not self.options.has_pair:
            return False
        return 1 in self.tokenizer.backend.encode("a", "b").type_ids

    def batches(self) -> Iterator[Any]:
        """RecordBatches in the order of the rows. Raises TokensError."""
        started = time.perf_counter()
        labels = self._labels()
        with row_files(self.rows) as files:
            tasks = [task for file in files for task in plan_tasks(file, self.options)]
            encoded = self._encode(tasks)
            if self.options.join:
                yield from join_blocks(encoded, self.options.max_length)
            else:
                yield from self._row_batches(encoded, labels)
        elapsed_s = time.perf_counter() - started
        rate = len(self.rows) / max(elapsed_s, 1e-9)
        logger.info("%s: %s rows/s", self.name, f"{rate:,.0f}")

    def _row_batches(self, encoded: Iterator[Encoded], labels: Any) -> Iterator[Any]:
        start = cut = 0
        for part in encoded:
            stop = start + len(part.lengths)
            columns = [_lists(part.ids, part.lengths)]
            if part.type_ids is not None and "token_type_ids" in self.schema.names:
                columns.append(_lists(part.type_ids, part.lengths))
            if labels is not None:
                columns.append(labels[start:stop])
            columns.append(pa.array(part.lengths))
            start, cut = stop, cut + int(part.cut.sum())
            self._facts["cut_rows"] = cut
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _encode(self, tasks: list[Task]) -> Iterator[Encoded]:
        """The first tasks here, to measure; the others where they are done first. The
        last one measured counts, since the first meets all words for the first time."""
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

    def _encode_elsewhere(self, tasks: list[Task], processes: int) -> Iterator[Encoded]:
        setup = {"tokenizer": str(self.tokenizer.path), "options": asdict(self.options)}
        answers = run_in_order(
            "flatout.engine.tokenizing.encoding", setup, tasks, processes
        )
        return map(Encoded.from_bytes, answers)

    def _labels(self) -> Any | None:
        """Targets (N,) as Arrow; None for language models. Raises TokensError."""
        if "label" not in self.rows.column_names:
            return None
        label = self.rows.data.table.column("label").combine_chunks()
        if self.label_names is None:
            return label
        ids = pc.index_in(label, pa.array(self.label_names, pa.string()))
        if ids.null_count:
            row = int(np.flatnonzero(ids.is_null().to_numpy(False))[0])
            raise TokensError(
                f"{self.name}: {ids.null_count} rows have a label that train never "
                f"has, the first {label[row].as_py()!r} in row {row}: nothing could "
                "learn it. Give train such rows, or take these out"
            )
        return ids.cast(pa.int64())


def _encode_task(
    encoder: Encoder, tables: dict[str, Any], task: Task, on_all_cores: bool
) -> Encoded:
    file, start, stop = task
    with tokenizer_parallelism(on_all_cores):
        return encode_slice(encoder, tables[file], start, stop)


def _lists(values: npt.NDArray[Any], lengths: npt.NDArray[np.int32]) -> Any:
    """List column over `values` (T,), without a copy."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
