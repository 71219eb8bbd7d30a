"""Train, validation and test rows: stable, without leaks, nothing lost in silence.

A row's split depends on its own content alone: the text is brought to one form
(Unicode NFKC, case and white space evened out) and hashed, and the hash, taken as a
number in [0, 1), is compared with the fractions. So a row keeps its split when rows
are appended, removed or put in another order; texts that are the same but for case
and space share a split; every label is spread in proportion, up to the chance of
independent draws: a label of n rows has n * f +- sqrt(n * f * (1 - f)) of them in a
split of fraction f. With a group column the group's name is hashed instead.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.data.columns import Columns, all_numbers, prose_beside
from flatout.engine.data.forms.given_splits import SplitTexts, entry_of
from flatout.engine.data.labels import (
    label_findings,
    label_report,
    label_warnings,
    reject_labels,
)
from flatout.engine.data.raw_texts import (
    SPLITS,
    RawTexts,
    RowNumber,
    batches_of,
    named_row,
)
from flatout.engine.data.row_facts import (
    DUPLICATE,
    Codes,
    FactCollector,
    RowFacts,
)
from flatout.engine.data.row_hashes import first_rows, leaks, repeats, scrambled
from flatout.engine.data.rows import REJECTED_SCHEMA, check_batch
from flatout.engine.data.split_report import (
    leak_warnings,
    split_report,
    summary_text,
    too_many_text,
)
from flatout.engine.files.spool import Spool
from flatout.engine.parameters import SplitSettings

logger = logging.getLogger(__name__)

SHOWN_LEAKS = 100
DEFAULT_TEXT_COLUMN = SplitSettings().text_column
"""Another name was chosen by the user, who may mean numbers."""


class SplitError(ValueError):
    """Rows that make no usable split; names rows, reasons and what to do."""


class SplitPlan:
    """Which split each row goes to. Computed when first asked for, in one pass over the
    raw rows; those that can be used are spooled, and not read from there again."""

    def __init__(
        self, raw: RawTexts, columns: Columns, settings: SplitSettings
    ) -> None:
        columns.check_present(raw)
        self.raw, self.columns, self.settings = raw, columns, settings
        self._folder: Path | None = None
        self._warned = False

    def prepare(self, folder: Path) -> None:
        """Where the spool goes: beside what is written, as a disk has room there."""
        self._folder = folder

    @cached_property
    def _read(self) -> tuple[RowFacts, list[Any], Spool]:
        return _first_pass(self.raw, self.columns, self._folder)

    @cached_property
    def _decided(self) -> tuple[Codes, Any]:
        """Codes (N,) of the good rows, and the table of all that are not used."""
        facts, rejected, _ = self._read
        codes = _assign(facts, self.settings)
        if not (facts.are_given or self.settings.keep_duplicates):
            codes[repeats(facts.exact)] = DUPLICATE
        elif facts.are_given and self.settings.on_leak == "drop":
            codes[_leaked(facts, codes)] = DUPLICATE
        late = []
        if self.columns.has_names:
            late = reject_labels(facts, codes)
        return codes, pa.Table.from_batches([*rejected, *late], REJECTED_SCHEMA)

    @cached_property
    def _leaks(self) -> list[list[RowNumber]]:
        """Of splits that are given: texts in several, by a row in each."""
        facts = self._read[0]
        if not facts.are_given:
            return []
        found = leaks(facts.exact, _assign(facts, self.settings))
        return [[facts.at(row) for row in rows] for rows in found[:SHOWN_LEAKS]]

    def rows(self, split: str) -> Iterator[Any]:
        """RecordBatches of the rows of a split."""
        codes, start = self._decided[0], 0
        for batch in self._read[2]:
            mask = codes[start : start + batch.num_rows] == SPLITS.index(split)
            start += batch.num_rows
            yield batch.filter(pa.array(mask))

    @property
    def rejected(self) -> Any:
        """Table with REJECTED_SCHEMA of every row that cannot be used."""
        return self._decided[1]

    @cached_property
    def report(self) -> dict[str, Any]:
        """Counts, shares and leaks; checks that no row is unaccounted for."""
        facts, codes = self._read[0], self._decided[0]
        found = label_findings(facts, codes)
        labels = label_report(facts, codes, SPLITS, found)
        kept = self.settings.keep_duplicates
        report = split_report(facts, codes, self.rejected, labels, repeats=kept)
        if facts.are_given:
            report["leaks"] = [list(map(named_row, rows)) for rows in self._leaks]
        logger.info(summary_text(report, self.rejected))
        for warning in (*label_warnings(report), *leak_warnings(report)):
            logger.warning(warning)
        return report

    def _check_texts(self) -> None:
        number, name = self._read[0].number_text, self.columns.text
        if number is None:
            return
        fault = f"split.text_column is {name!r}, and each text in it is a number, as "
        fault += repr(number)
        other = prose_beside(self.raw, self.columns)
        hint = f"did you mean {other.name!r} ({other.example!r})?" if other else ""
        if other and name == DEFAULT_TEXT_COLUMN:
            raise SplitError(
                f"{fault}: {hint} Set split.text_column; to train on the numbers, give "
                "their column another name and set that"
            )
        if not self._warned:
            logger.warning("%s: %s", fault, hint or "is that the right column?")
        self._warned = True

    def _numbers_hint(self) -> str:
        """Of labels that are numbers, and hardly classes."""
        sets = self._read[0].label_sets if self.columns.has_classes else []
        names = pa.array([name for one in sets for name in one], pa.string())
        if len(names) < MANY_NUMBERS or not all_numbers(names):
            return ""
        return f". The labels are {len(names):,} numbers: model.task: regression?"

    def check_usable(self) -> None:
        """Raises SplitError where too much was rejected, or a split is unusable."""
        report, limit = self.report, self.settings.max_rejected_fraction
        if report["rejected"] > limit * report["rows_in"]:
            text = too_many_text(report, self.rejected, limit)
            raise SplitError(f"{text}{self._numbers_hint()}")
        self._check_texts()
        if self.columns.has_names:
            _check_labels(report, lists=not self.columns.has_classes)
        empty = [name for name in SPLITS if report["rows_out"][name] == 0]
        if empty and self._read[0].are_given:
            told = "split_report says"
            if report["rejected"]:
                told = "rejected_rows and split_report say"
            raise SplitError(
                f"no usable row is left in {' and '.join(empty)}: {told} why. Give it "
                "rows, or none at all: then they are taken from train"
            )
        if empty:
            raise SplitError(
                f"no row fell into {' and '.join(empty)}: {report['rows_in']} rows are "
                "too few for split.fractions. Give more rows or raise the fraction"
            )


MANY_NUMBERS = 50
"""Distinct labels, all of them numbers, beyond which they are hardly classes."""


def _first_pass(
    raw: RawTexts, columns: Columns, folder: Path | None
) -> tuple[RowFacts, list[Any], Spool]:
    collected, spool = FactCollector(), Spool(folder, columns.row_schema)
    for batch in batches_of(raw, columns.names):
        checked = check_batch(batch, columns)
        collected.add(checked, batch)
        spool.add(checked.table)
    spool.close()
    if not collected.num_raw:
        raise SplitError("raw_texts is empty: it has columns but no rows")
    for name in raw.parts if isinstance(raw, SplitTexts) else ():
        if SPLITS.index(name) not in collected.given:
            raise SplitError(
                f"{entry_of(name)} is empty: it has columns but no rows. Give it rows, "
                "or take it out of the catalog: its rows are then taken from train"
            )
    return collected.facts(), collected.rejected, spool


def _assign(facts: RowFacts, settings: SplitSettings) -> Codes:
    """Split codes (N,) from the hashes alone, or as they are given; of one that is not
    given from the hashes of train's rows."""
    hashes = facts.near if facts.groups is None else facts.groups
    fractions = settings.fractions
    shares = [fractions.train, fractions.validation, fractions.test]
    dealt = [code for code in range(3) if code == 0 or code not in facts.given]
    bounds = np.cumsum([shares[code] for code in dealt])
    places = scrambled(hashes, settings.seed).astype(np.float64) / 2.0**64
    # The last split has all that is left, whatever the fractions add up to.
    whole = bounds[-1] if facts.are_given else 1.0
    at = np.searchsorted(bounds[:-1] / whole, places, side="right")
    codes: Codes = np.array(dealt, np.int8)[at]
    return np.where(facts.splits > 0, facts.splits, codes)


def _leaked(facts: RowFacts, codes: Codes) -> npt.NDArray[np.bool_]:
    """(N,) train's rows whose text is in another split, too."""
    starts = first_rows(facts.exact)
    elsewhere = np.zeros(len(starts), bool)
    elsewhere[starts[codes > 0]] = True
    found: npt.NDArray[np.bool_] = elsewhere[starts] & (codes == 0)
    return found


def _check_labels(report: dict[str, Any], *, lists: bool) -> None:
    if report["labels"] == 0:
        raise SplitError(
            "no row of train has a label: there is nothing to learn. Check "
            "split.label_column"
        )
    if report["labels"] == 1 and not lists:
        (name,) = report["label_shares"]["train"]
        several = report["texts_with_several_labels"]
        left = f" ({several:,} texts came with other labels too)" if several else ""
        raise SplitError(
            f"every row has the label {name!r}: there is nothing to tell apart{left}. "
            "Check split.label_column"
        )
