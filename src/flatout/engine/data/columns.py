"""Map raw columns to their roles, and report columns in the parameters that are missing
or probably wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from flatout.engine.data.given_splits import SplitTexts, entry_of
from flatout.engine.data.raw_texts import RawTexts, RawTextsError
from flatout.engine.parameters import SplitSettings
from flatout.engine.parameters.faults import similar

DELIMITERS = {";": '";"', "\t": r'"\t"', "|": '"|"', ",": '","'}
"""Possible column separators, with their spelling in YAML."""
FIRST_COLUMNS = {
    "completion": "prompt_column",
    "messages": "messages_column",
    "pairs": "anchor_column",
    "ranking": "query_column",
}
"""For each form of rows, the `split` parameter that sets the main text column."""
COMPARED = {
    "pairs": ("needs pairs", "positive"),
    "ranking": ("ranks passages", "passage"),
}
"""Forms that compare two texts. Each value contains a phrase that describes the form's
tasks in error messages, and the name of the second text."""
EXCERPT_CHARACTERS = 80
DEFAULT_LABEL = SplitSettings().label_column
CLASS_NAMES = pa.string()
NUMBER = r"^\s*[-+]?\p{Nd}+([.,:/-]\p{Nd}+)*\s*%?\s*$"
"""Matches numbers, dates and times."""


@dataclass(frozen=True)
class Columns:
    """The raw column names by role. A role is None if the rows have no such column."""

    text: str
    text_pair: str | None
    label: str | None
    group: str | None
    label_type: Any = CLASS_NAMES
    """Arrow type of the labels that the task expects."""
    flags: tuple[str, ...] = ()
    """Columns of zeros and ones, one per label, used instead of the label column."""
    split: str | None = None
    """The column that names the split of each row."""
    form: str = "text"
    """Form of the rows: `text`, `words` (each with a tag), `completion` (of a prompt),
    `messages`, `pairs` (an anchor and the texts to compare with it), or `ranking` (a
    query and a passage)."""
    completion: str | None = None
    positive: str | None = None
    negative: str | None = None

    @classmethod
    def of(
        cls, settings: SplitSettings, label_type: Any, task: str, form: str = "text"
    ) -> Columns:
        """Create the columns from the parameters. `label_type` is the Arrow type of the
        task's labels, or None for a task without labels. Raises RawTextsError if the
        parameters do not fit the task."""
        flags = tuple(settings.label_columns or ())
        if flags and not (is_names(label_type) and form == "text"):
            raise RawTextsError(
                "split.label_columns are for several labels per row, and model.task is "
                f"{task}: set split.label_column, or another task (docs/tasks.md)"
            )
        what, second = COMPARED.get(form, ("", "text_pair"))
        first = FIRST_COLUMNS.get(form, "text_column")
        if what and getattr(settings, first) is None:
            raise RawTextsError(
                f"model.task is {task}, which {what}: set split.{first} and "
                f"split.{second}_column"
            )
        if form != "text" and settings.text_pair_column:
            other = f"whose second text is split.{second}_column"
            raise RawTextsError(
                f"split.text_pair_column cannot be used with model.task {task}, "
                f"{other if what else f'if its rows are {form}'}: set it to null"
            )
        if label_type is not None and settings.label_column is None and not flags:
            raise RawTextsError(
                f"model.task is {task}, which needs labels: set split.label_column "
                "(or a model.task for unlabelled text)"
            )
        if form == "pairs" and settings.label_column is not None:
            label_type = pa.float64()
        paired = None if form == "pairs" else getattr(settings, f"{second}_column")
        return cls(
            text=getattr(settings, first) or settings.text_column,
            text_pair=paired,
            label=None if label_type is None or flags else settings.label_column,
            group=settings.group_column
            or (settings.query_column if form == "ranking" else None),
            label_type=label_type,
            flags=flags,
            split=settings.split_column,
            form=form,
            completion=settings.completion_column if form == "completion" else None,
            positive=settings.positive_column if form == "pairs" else None,
            negative=settings.negative_column if form == "pairs" else None,
        )

    def among(self, present: Sequence[str]) -> Columns:
        """Return the columns to read from a file with the columns `present`. The score
        of pairs is optional: its default column is left out if the file lacks it."""
        optional = self.form == "pairs" and self.label == DEFAULT_LABEL
        absent = optional and self.label not in present
        return replace(self, label=None) if absent else self

    @property
    def has_labels(self) -> bool:
        """Return whether rows have labels or targets in addition to their text."""
        return self.label is not None or bool(self.flags)

    @property
    def has_classes(self) -> bool:
        """Return whether the label of each row is the name of a single class."""
        return self.label is not None and pa.types.is_string(self.label_type)

    @property
    def names(self) -> list[str]:
        wanted = (self.text, self.text_pair, self.completion, self.label)
        others = (self.positive, self.negative, self.group, self.split)
        named = [name for name in (*wanted, *others) if name is not None]
        return list(dict.fromkeys([*named, *self.flags]))

    @property
    def row_schema(self) -> pa.Schema:
        """Arrow schema of the validated rows, independent of raw column names."""
        fields = [("text", pa.string())]
        fields += [("text_pair", pa.string())] if self.text_pair else []
        if self.form in ("completion", "messages"):
            fields.append((self.form, pa.string()))
        if self.form == "pairs":
            fields.append(("passages", pa.list_(pa.string())))
        fields += [("label", self.label_type)] if self.has_labels else []
        return pa.schema([*fields, ("source_row", pa.int64())])

    def check_present(self, raw: RawTexts) -> None:
        """Raise RawTextsError if `raw` lacks a column, or if parameters contradict each
        other. The message lists the missing and the existing columns."""
        second = "passage" if self.form == "ranking" else "text_pair"
        wanted = {
            f"split.{FIRST_COLUMNS.get(self.form, 'text_column')}": self.text,
            "split.completion_column": self.completion,
            "split.positive_column": self.positive,
            "split.negative_column": self.negative,
            f"split.{second}_column": self.text_pair,
            "split.label_column": self.label,
            "split.group_column": self.group,
            "split.split_column": self.split,
            **{f"split.label_columns[{n}]": f for n, f in enumerate(self.flags)},
        }
        parts: dict[str, RawTexts] = {"raw_texts": raw}
        if isinstance(raw, SplitTexts):
            parts = {entry_of(name): part for name, part in raw.parts.items()}
        for entry, part in parts.items():
            present = part.column_names
            if faults := column_faults(present, wanted, entry):
                columns = listed(present)
                faults += _folder_hint(part, wanted)
                raise RawTextsError(f"{entry} has the columns {columns}. {faults}")
        if self.negative and self.label:
            raise RawTextsError(
                f"split.label_column is {self.label!r}, and triplets have no score: "
                "set it, or split.negative_column, to null"
            )
        if self.split and isinstance(raw, SplitTexts):
            raise RawTextsError(
                f"split.split_column is {self.split!r}, but the splits have their own "
                "entries: set it to null, or give all rows as raw_texts"
            )


def is_names(label_type: Any) -> bool:
    """Return whether `label_type` is the Arrow type of lists of label names."""
    is_list = label_type is not None and pa.types.is_list(label_type)
    return bool(is_list and pa.types.is_string(label_type.value_type))


def listed(present: Sequence[str]) -> str:
    return ", ".join(map(repr, present)) or "none"


def column_faults(
    present: Sequence[str],
    wanted: Mapping[str, str | None],
    entry: str,
    advice: str = "Set the names in conf/local/parameters.yml",
) -> str | None:
    """Return a message if columns are missing or ambiguous, else None.

    `wanted` maps parameter names to column names. The message suggests similar column
    names and ends with `advice`. `entry` is the name of the catalog entry.
    """
    wrong = {
        parameter: name
        for parameter, name in wanted.items()
        if name is not None and present.count(name) != 1
    }
    if not wrong:
        return None
    delimiter = _other_delimiter(present)
    faults = [
        f"{parameter} is {name!r}, which is "
        + ("there twice" if name in present else "not there")
        + ("" if delimiter or name in present else _near(name, present))
        for parameter, name in wrong.items()
    ]
    if delimiter:
        advice = (
            f"The one column looks like several with {delimiter} between them: set "
            f"delimiter: {delimiter} for {entry} in conf/local/catalog.yml "
            f"(pandas.CSVDataset: load_args: {{sep: {delimiter}}})"
        )
    return ". ".join([*faults, advice])


def _folder_hint(raw: RawTexts, wanted: Mapping[str, str | None]) -> str:
    """Return a hint if the name of a wanted column is part of a folder name, such as
    `label=good`, or an empty string."""
    parts = {part for file in getattr(raw, "files", []) for part in file.parts[:-1]}
    found = sorted(p for p in parts if "=" in p and p.split("=")[0] in wanted.values())
    hint = ". Names of folders ({}) are not read: add the column to the files"
    return hint.format(found[0]) if found else ""


def _near(name: str, present: Sequence[str]) -> str:
    """Return a hint with the column name most similar to `name`, or an empty string."""
    forms = {other.strip().casefold(): other for other in present}
    near = similar(name.strip().casefold(), forms)
    return f" (did you mean {forms[near]!r}?)" if near else ""


def _other_delimiter(present: Sequence[str]) -> str | None:
    """Return the delimiter (as spelled in YAML) if the only column looks like a header
    that was not split into columns, otherwise None."""
    header = present[0] if len(present) == 1 else ""
    return next((text for mark, text in DELIMITERS.items() if mark in header), None)


def all_numbers(texts: Any) -> bool:
    """Return whether `texts` is not empty and every text is a number."""
    numbers = pc.match_substring_regex(texts, NUMBER)
    return len(texts) > 0 and bool(pc.all(numbers).as_py())


def excerpt(value: Any) -> str:
    """Return the first EXCERPT_CHARACTERS characters of a value as printable text."""
    try:
        text = str(value.as_py())
    except UnicodeDecodeError as error:
        text = repr(error.object)
    return cut_text(text)


def cut_text(text: str) -> str:
    """Return the first EXCERPT_CHARACTERS characters of `text` as printable text."""
    cut = text[:EXCERPT_CHARACTERS]
    return cut.encode("utf-8", "replace").decode().replace("\x00", "\\0")
