"""Mine hard negatives, which are passages that a model confuses with a positive.

For each anchor, all passages of a corpus are ranked, block by block, by the exact dot
product of the passage's and the anchor's vectors. A passage is skipped if its score
exceeds the positive's score minus a margin, because it is probably another positive.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from flatout.engine.data.columns import column_faults, listed
from flatout.engine.data.raw_texts import RawTextsError, open_raw_texts
from flatout.engine.files.arrow_folder import without_indices
from flatout.engine.files.content_key import ContentKey
from flatout.engine.models.building import ModelError
from flatout.engine.parameters import (
    MineSettings,
    PredictSettings,
    Settings,
    SettingsError,
)
from flatout.engine.predict.checks import model_file_hashes
from flatout.engine.predict.predictor import Predictor
from flatout.engine.predict.texts import TextEncoder, text_windows
from flatout.engine.predict.vectors import (
    Vectors,
    best,
    chosen,
    stored_vectors,
)
from flatout.engine.rows.layout import Ints
from flatout.engine.tokenizing.encoders.encoded import PASSAGES
from flatout.engine.tokenizing.tokenizer import TokenizerFile

logger = logging.getLogger(__name__)

ANCHORS_AT_ONCE = 4_096
ROWS_AT_ONCE = 16_384
SCHEMA = pa.schema(
    [
        ("anchor", pa.string()),
        ("positive", pa.string()),
        ("negative", pa.list_(pa.string())),
        ("split", pa.string()),
    ]
)


@dataclass(frozen=True)
class Triplets:
    """Lazy table with the columns of SCHEMA: the train pairs with mined negatives, and
    the unchanged validation and test pairs."""

    splits: Mapping[str, Any]
    """The tables of all splits, with the columns `text` and `passages`."""
    corpus: Any
    """The distinct passages of the corpus as an Arrow array (C,)."""
    vectors: Callable[[Any], list[Vectors]]
    """A function that returns the vectors of an Arrow array of N texts, in parts."""
    device: torch.device
    options: MineSettings

    schema = SCHEMA

    def batches(self) -> Iterator[Any]:
        """Yield RecordBatches of SCHEMA. Raises SettingsError if no negatives exist."""
        splits = dict(self.splits)
        train = splits.pop("train")
        texts, pairs = _numbered(self.corpus, *_pairs(train))
        negatives = self._mined(self.vectors(texts), *pairs)
        for start in range(0, len(negatives), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            known = negatives[rows] >= 0
            ends = np.append(0, np.cumsum(known.sum(1))).astype(np.int32)
            found = texts.take(negatives[rows][known]).cast(pa.string())
            one, other = (texts.take(numbers[rows]) for numbers in pairs)
            lists = pa.ListArray.from_arrays(ends, found)
            yield _batch(one, other, lists, "train")
        for name, table in splits.items():
            for batch in table.to_batches(ROWS_AT_ONCE):
                others = pc.list_slice(
                    batch.column(PASSAGES), 1, return_fixed_size_list=False
                )
                yield _batch(*_pairs(batch), others, name)

    def _mined(self, vectors: list[Vectors], anchors: Ints, positives: Ints) -> Ints:
        """Return the text numbers (N, negatives) of the mined negatives of N pairs,
        best first. Missing negatives are -1. `anchors` and `positives` are the text
        numbers of the pairs (N,)."""
        options = self.options
        found = np.full((len(anchors), options.negatives), -1)
        order = np.argsort(anchors, kind="stable")
        queries, starts = np.unique(anchors[order], return_index=True)
        bounds = np.append(starts, len(order))
        for first in range(0, len(queries), ANCHORS_AT_ONCE):
            own = queries[first : first + ANCHORS_AT_ONCE]
            rows = order[bounds[first] : bounds[first + len(own)]]
            query = np.searchsorted(own, anchors[rows])
            themselves = np.stack([np.arange(len(own)), own])
            left_out = np.hstack([np.stack([query, positives[rows]]), themselves])
            ours = chosen(vectors, own)
            cosines = (ours[query] * chosen(vectors, positives[rows])).sum(1)
            limits = np.full((len(own), 1), np.inf)  # the lowest limit of each anchor
            np.minimum.at(limits[:, 0], query, cosines - options.margin)
            scores, numbers = best(
                ours, vectors, len(self.corpus), options.top_k, left_out, self.device
            )
            right = (np.isfinite(scores) & (scores <= limits))[query]
            rank = np.cumsum(right, 1) - 1
            at, place = np.nonzero(right & (rank < options.negatives))
            found[rows[at], rank[at, place]] = numbers[query[at], place]
        _check_counts((found >= 0).sum(1), options)
        return found


def mine(
    model: Any,
    tokenizer: TokenizerFile,
    splits: Mapping[str, Any],
    corpus: Any,
    settings: Settings,
) -> Triplets:
    """Return the triplets for rows of pairs. `splits` maps split names to
    `datasets.Dataset` objects, and `corpus` is any input of `open_raw_texts`. Raises
    ModelError, RawTextsError or SettingsError if they do not fit together."""
    for name, rows in splits.items():
        if PASSAGES not in rows.column_names or "label" in rows.column_names:
            raise SettingsError(
                f"{name}_rows has no pairs of an anchor and its positive: set "
                "model.task: embedding, split.anchor_column, split.positive_column, "
                "split.label_column: null, and run kedro run --pipelines=split"
            )
    options = settings.mine
    passages = corpus_texts(corpus, options.text_column)
    if (count := len(passages)) < options.top_k:
        raise SettingsError(
            f"mine.top_k={options.top_k}, and mine_corpus has {count} distinct texts: "
            f"set it to at most {count}, or give more texts"
        )
    return Triplets(
        {name: without_indices(rows).data.table for name, rows in splits.items()},
        passages,
        *_vectors(model, tokenizer, settings),
        options,
    )


def _vectors(
    model: Any, tokenizer: TokenizerFile, settings: Settings
) -> tuple[Callable[[Any], list[Vectors]], torch.device]:
    """Return a function that computes the vectors of texts or loads stored ones, and
    the device on which the model runs."""
    digest = ContentKey(model_file_hashes(model.config)).digest
    settings = settings.changed({"predict.text_pair_column": None})
    predictor = Predictor(model, tokenizer, settings)
    task, runtime = predictor.task, predictor.runtime
    if [field.name for field in task.answer_fields()] != ["vector"]:
        raise ModelError(
            f"{model.config.name_or_path or 'the model'} computes no vectors: train "
            "one with model.task: embedding, or let model and model_tokenizer of the "
            "catalog name the folder of one"
        )
    encoder = TextEncoder(predictor, model, tokenizer)

    def encode(texts: Any) -> Vectors:
        found = task.answers(predictor.logits(encoder.encode(texts)))["vector"]
        return np.stack(found)

    key = f"{digest} {tokenizer.digest} {predictor.max_length} {runtime.precision}"
    folder = Path(settings.mine.folder)
    return lambda texts: stored_vectors(texts, encode, folder, key), runtime.device


def corpus_texts(corpus: Any, column: str) -> Any:
    """Return the distinct texts of a corpus as an Arrow array (C,): the passages of
    pairs, or else the texts in `column`. Raises RawTextsError if this column is
    missing."""
    raw = open_raw_texts(corpus, "mine_corpus")
    present = raw.column_names
    if PASSAGES in present:
        lists = [batch.columns[PASSAGES] for batch in raw.batches([PASSAGES])]
        return _distinct(*(one.flatten() for one in lists))
    if faults := column_faults(present, {"mine.text_column": column}, "mine_corpus"):
        raise RawTextsError(f"mine_corpus has the columns {listed(present)}. {faults}")
    windows = text_windows(raw, PredictSettings(text_column=column))
    columns = [window.column("text").combine_chunks() for window in windows]
    if unused := sum(texts.null_count for texts in columns):
        logger.warning("mine_corpus: %d rows without a text are left out", unused)
    return _distinct(*(texts.drop_null() for texts in columns))


def _pairs(table: Any) -> tuple[Any, Any]:
    return table.column("text"), pc.list_element(table.column(PASSAGES), 0)


def _distinct(*columns: Any) -> Any:
    chunks = [c for one in columns for c in getattr(one, "chunks", [one])]
    large = [chunk.cast(pa.large_string()) for chunk in chunks]
    return pc.unique(pa.chunked_array(large, pa.large_string()))


def _numbered(corpus: Any, *columns: Any) -> tuple[Any, list[Ints]]:
    """Return the distinct texts of the corpus and of `columns` as one array, beginning
    with the corpus, and the index in it of each text of each column."""
    texts = _distinct(corpus, *columns)
    found = (pc.index_in(column.cast(texts.type), texts) for column in columns)
    return texts, [numbers.to_numpy().astype(np.int64) for numbers in found]


def _batch(anchors: Any, positives: Any, negatives: Any, split: str) -> Any:
    columns = [anchors, positives, negatives, pa.repeat(split, len(anchors))]
    pairs = zip(columns, SCHEMA.types, strict=True)
    return pa.RecordBatch.from_arrays([c.cast(t) for c, t in pairs], schema=SCHEMA)


def _check_counts(counts: Ints, options: MineSettings) -> None:
    remedy = "raise mine.top_k, or lower mine.margin"
    if not counts.any():
        raise SettingsError(
            f"no pair has a negative: all of the {options.top_k} best passages of each "
            f"anchor score above its positive less {options.margin:g}: {remedy}"
        )
    logger.info("%d pairs have %.2f negatives each", len(counts), counts.mean())
    if none := int((counts == 0).sum()):
        logger.warning("%d pairs have no negative: %s", none, remedy)
