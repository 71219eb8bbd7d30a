"""Recipes for rows of a fixed shape, and the content keys of these rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from flatout.engine.arrays.array_files import ArrayFiles, open_source
from flatout.engine.arrays.sample_split import SampleSplit, label_names_of
from flatout.engine.arrays.sources import ArraySource, FilesKey
from flatout.engine.data.columns import is_names
from flatout.engine.data.dropped import drop_key
from flatout.engine.data.raw_texts import SPLITS
from flatout.engine.data.split import SplitError, one_label_text
from flatout.engine.data.split_recipes import PlanRecipe, RejectedRecipe, ReportRecipe
from flatout.engine.files.arrow_folder import ArrowRecipe
from flatout.engine.files.content_key import ContentKey
from flatout.engine.parameters import (
    ArraySettings,
    ImageSettings,
    ModelSettings,
    SettingsError,
    SplitSettings,
)
from flatout.engine.rows.arrays import ArrayFacts
from flatout.engine.tasks import make_task

FORMAT_VERSION = 5
"""Increase this whenever the same input would give different rows."""
TEXT_ONLY = ("group_column", "split_column")
"""Parameters of `split` that determine the split of texts, but not of samples."""


@dataclass(frozen=True)
class SamplesRecipe(PlanRecipe, ArrowRecipe):
    """Recipe for the rows of a split, with the columns `inputs`, `source` and, if there
    are labels, `labels`."""

    split: str
    names: list[str]
    """The names of the input columns of tables."""
    _facts: dict[str, Any] = field(default_factory=dict, repr=False)

    def facts(self) -> dict[str, Any]:
        """Return the shape, means, standard deviations and class counts of the rows.
        The dict is empty until the last batch has been yielded."""
        return self._facts

    @cached_property
    def schema(self) -> Any:
        """Arrow schema of the rows, taken from the first batch."""
        return next(self.plan.rows(self.split)).schema

    def batches(self) -> Iterator[Any]:
        """Yield the rows as RecordBatches, in order. Raises SplitError or ArraysError
        if the samples cannot be used."""
        facts = ArrayFacts(names=self.names)
        for batch in self.plan.rows(self.split):
            facts.add(batch)
            yield batch
        self._facts.update(facts.as_dict())


def array_recipes(
    raw: Path,
    split: SplitSettings,
    own: ArraySettings | ImageSettings,
    model: ModelSettings,
) -> dict[str, Any]:
    """Return a dict with recipes for the splits, the `rejected` rows and the `report`,
    and with the `label_names`. Raises ArraysError or SplitError if the samples cannot
    be used, and SettingsError if the parameters do not fit them."""
    for name in TEXT_ONLY:
        if column := getattr(split, name):
            raise SettingsError(
                f"split.{name} is {column!r}, which is for texts only: the split of a "
                "sample depends on nothing but its content. Set it to null"
            )
    task = make_task(model)
    if task.texts.form != "text" or is_names(task.label_type):
        raise SettingsError(
            f"model.task: {model.task} is for texts only: set sequence-classification "
            "or regression, or image-classification for images"
        )
    source = open_source(raw, split.label_column, own)
    names = label_names_of(source, task)
    if len(names) == 1:
        raise SplitError(one_label_text(names[0]))
    plan = SampleSplit(source, split, make_task(model, names))

    columns = source.column_names if isinstance(source, ArrayFiles) else []

    def key(result: str) -> FilesKey:
        return _key(result, source, split, model)

    return {
        "rejected": RejectedRecipe(key("rejected"), plan),
        **{name: SamplesRecipe(key(name), plan, name, columns) for name in SPLITS},
        "label_names": names,
        "report": ReportRecipe(key("report"), plan),
    }


def changes_since(
    stored: ContentKey, source: ArraySource, split: SplitSettings, model: ModelSettings
) -> list[str]:
    """Return a description of each input that has changed since the rows with the key
    `stored` were created. The list is empty if nothing has changed."""
    key = _key(stored.fields.get("result"), source, split, model)
    return [] if key.describes(stored) else key.changes_since(stored)


def _key(
    result: Any, source: ArraySource, split: SplitSettings, model: ModelSettings
) -> FilesKey:
    options = {
        "format": FORMAT_VERSION,
        "result": result,
        **source.options,
        "model.task": model.task,
        "split.fractions": split.fractions.model_dump(),
        "split.seed": split.seed,
        **({"split.folds": split.folds} if split.folds else {}),
    }
    if split.drop_rows:
        options["split.drop_rows"] = drop_key(split.drop_rows)
    return FilesKey(options, source.files)
