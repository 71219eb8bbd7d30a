"""Recipes of rows of a fixed shape, keyed by everything that decides them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from flatout.engine.arrays.dealing import Dealt, label_names_of, one_class_text
from flatout.engine.arrays.sources import ArraysError, ArraySource
from flatout.engine.data.raw_texts import SPLITS
from flatout.engine.files.arrow_folder import ArrowRecipe
from flatout.engine.files.content_key import ContentKey
from flatout.engine.parameters import ModelSettings, SplitSettings
from flatout.engine.rows.array_facts import ArrayFacts
from flatout.engine.rows.encoded_images import with_files
from flatout.engine.rows.fixed_lists import array_of
from flatout.engine.tasks import Task, make_task

FORMAT_VERSION = 3
"""Raise it when the same input would give other rows."""


@dataclass(frozen=True)
class _DealtRecipe:
    """How to make what dealt samples give."""

    key: ContentKey
    dealt: Dealt

    def prepare(self, folder: Path) -> None:
        self.dealt.source.prepare(folder)


@dataclass(frozen=True)
class ArraysRecipe(_DealtRecipe, ArrowRecipe):
    """How to make the rows of one split: `inputs`, `labels` as there are, `source`."""

    split: str
    task: Task
    _facts: dict[str, Any] = field(default_factory=dict, repr=False)

    def facts(self) -> dict[str, Any]:
        """Shape, means and deviations, rows of each class, of the last pass."""
        return self._facts

    @cached_property
    def schema(self) -> Any:
        """Of the first batch."""
        return next(stored for _, parts in self._batches() for stored in parts).schema

    def batches(self) -> Iterator[Any]:
        """RecordBatches in the order of the rows. Raises ArraysError."""
        facts = ArrayFacts()
        for batch, parts in self._batches():
            facts.add(batch)
            yield from parts
        self._facts.update(facts.as_dict())

    def _batches(self) -> Iterator[tuple[Any, Iterator[Any]]]:
        """With their values, and as they are stored."""
        for window, rows, labels in self.dealt.windows(self.split):
            columns = {"inputs": array_of(self.dealt.values(window, rows))}
            if self.task.label_type is not None:
                told = pa.array(labels.tolist(), self.task.label_type)
                columns["labels"] = self.task.encode_labels(told)
            columns["source"] = pa.array([window.name(row) for row in rows.tolist()])
            batch = pa.record_batch(columns)
            if window.files is None:
                yield batch, iter([batch])
            else:
                files = [window.files[row] for row in rows.tolist()]
                yield batch, with_files(batch, files)


class RejectedRecipe(_DealtRecipe):
    """How to make the table of samples that cannot be used."""

    def table(self) -> Any:
        return self.dealt.rejected


class ReportRecipe(_DealtRecipe):
    """How to make the report."""

    def value(self) -> dict[str, Any]:
        return self.dealt.report


def array_recipes(
    kind: str, source: ArraySource, split: SplitSettings, model: ModelSettings
) -> dict[str, Any]:
    """The three splits, `rejected`, `label_names` and `report`. `kind`: what the rows
    are called in the catalog. Raises ArraysError, SettingsError."""
    names = label_names_of(source, make_task(model))
    if len(names) == 1:
        raise ArraysError(one_class_text(names[0]))
    task = make_task(model, names)
    dealt = Dealt(source, split, task)
    fields = _fields(source, split, model)

    def key(result: str) -> ContentKey:
        return ContentKey({**fields, "result": result})

    rows = {
        name: ArraysRecipe(key(f"{name}_{kind}"), dealt, name, task) for name in SPLITS
    }
    return {
        "rejected": RejectedRecipe(key("rejected"), dealt),
        **rows,
        "label_names": names,
        "report": ReportRecipe(key("report"), dealt),
    }


def changes_since(
    stored: ContentKey, source: ArraySource, split: SplitSettings, model: ModelSettings
) -> list[str]:
    """What is another now than when rows with the key `stored` were made."""
    wanted = ContentKey(_fields(source, split, model))
    known = ContentKey({name: stored.fields.get(name) for name in wanted.fields})
    return wanted.changes_since(known)


def _fields(
    source: ArraySource, split: SplitSettings, model: ModelSettings
) -> dict[str, Any]:
    return {
        "format": FORMAT_VERSION,
        "files": source.digest,
        **source.options,
        "model.task": model.task,
        "split.fractions": split.fractions.model_dump(),
        "split.seed": split.seed,
    }
