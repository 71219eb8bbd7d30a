"""Token rows: encoded on all cores, keyed by everything that decides them."""

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

from flatout.engine.data.arrow_folder import ArrowRecipe, without_indices
from flatout.engine.data.content_key import ContentKey, arrow_digest
from flatout.engine.data.workers import run_in_order
from flatout.engine.environment import tokenizer_parallelism
from flatout.engine.settings import Auto, ModelSettings, TokenizeSettings
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

FORMAT_VERSION = 1
"""Raise it when the same input would give other token rows."""
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


def tokens_recipe(
    name: str,
    rows: Any,
    tokenizer: TokenizerFile,
    label_names: list[str],
    model: ModelSettings,
    tokenize: TokenizeSettings,
) -> TokensRecipe:
    """For the split `name`; `rows` is a `datasets.Dataset`. Raises TokensError."""
    _check_length(tokenizer, tokenize.max_length)
    rows = without_indices(rows)
    options = _options(rows, tokenizer, model, tokenize)
    columns = [n for n in ("text", "text_pair", "label") if n in rows.column_names]
    fields = {
        "format": FORMAT_VERSION,
        "rows": arrow_digest([rows.data.table.select(columns)]),
        "tokenizer": tokenizer.digest,
        "label_names": label_names,
        **token_options(model, tokenize),
    }
    regression = model.task == "regression"
    return TokensRecipe(
        key=ContentKey(fields),
        rows=rows,
        name=name,
        tokenizer=tokenizer,
        options=options,
        label_names=None if regression else label_names,
        num_processes=tokenize.num_processes,
    )


def token_options(model: ModelSettings, tokenize: TokenizeSettings) -> dict[str, Any]:
    """Parameters that decide the token rows, by their path."""
    trained = model.name_or_path is None
    return {
        "model.task": model.task,
        "model.name_or_path": model.name_or_path,
        "model.revision": model.revision,
        "tokenize.max_length": tokenize.max_length,
        "tokenize.vocab_size": tokenize.vocab_size if trained else None,
        "tokenize.join_texts": tokenize.join_texts,
    }


def _options(
    rows: Any,
    tokenizer: TokenizerFile,
    model: ModelSettings,
    tokenize: TokenizeSettings,
) -> EncodeOptions:
    join = tokenize.join_texts
    if join and model.task not in ("causal-lm", "masked-lm"):
        raise TokensError(
            "tokenize.join_texts is for language models, and model.task is "
            f"{model.task}"
        )
    ends_alone = tokenizer.backend.num_special_tokens_to_add(False) > 0
    return EncodeOptions(
        max_length=tokenize.max_length,
        has_pair="text_pair" in rows.column_names,
        join=join,
        end_id=tokenizer.token_id("eos_token") if join and not ends_alone else None,
        empty_id=empty_text_id(tokenizer),
    )


def empty_text_id(tokenizer: TokenizerFile) -> int | None:
    """The id that stands for a text of which the tokenizer leaves no token."""
    names = ("unk_token", "eos_token", "sep_token", "bos_token")
    ids = (tokenizer.token_id(name) for name in names)
    return next((id_ for id_ in ids if id_ is not None), None)


def _check_length(tokenizer: TokenizerFile, max_length: int) -> None:
    limit = tokenizer.max_positions
    if limit is not None and max_length > limit:
        raise TokensError(
            f"tokenize.max_length is {max_length}, but the model takes rows of at most "
            f"{limit} tokens: set tokenize.max_length to {limit} or less, or a larger "
            "model.config.max_position_embeddings where it is trained from scratch"
        )
    added = tokenizer.backend.num_special_tokens_to_add(False)
    if max_length <= added:
        raise TokensError(
            f"tokenize.max_length is {max_length}, and the tokenizer adds {added} "
            "special tokens to each text: no token of the text would be left"
        )


def label_names_of(rows: Any) -> list[str]:
    """Distinct labels, sorted; as numbers where all of them are whole numbers."""
    if "label" not in rows.column_names:
        return []
    label = rows.data.table.column("label")
    if pa.types.is_floating(label.type):
        return []
    names = pc.unique(label).to_pylist()
    try:
        return sorted(names, key=int)
    except ValueError:
        return sorted(names)
