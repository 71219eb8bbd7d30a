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
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from flatout.engine.arrow_folder import ArrowRecipe
from flatout.engine.content_key import ContentKey
from flatout.engine.raw_texts import Kind, RawTexts, RawTextsError
from flatout.engine.rows import (
    REJECTED_SCHEMA,
    CheckedBatch,
    Columns,
    check_batch,
    rejected_batch,
)
from flatout.engine.settings import SplitSettings

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
REJECTED, DUPLICATE = -1, -2
FORMAT_VERSION = 1
"""Raise it when the same input would give other rows."""

Hashes = npt.NDArray[np.uint64]
Codes = npt.NDArray[np.int8]


class SplitError(ValueError):
    """Rows that make no usable split; names rows, reasons and what to do."""


@dataclass(frozen=True)
class _Facts:
    """What the first pass keeps of the good rows, N in all. About 50 bytes a row."""

    exact: Hashes
    """(N, 2) 128-bit hash of the text (and its pair)."""
    near: Hashes
    """(N,) hash of the text in one form."""
    groups: Hashes | None
    labels: npt.NDArray[np.int32]
    label_names: list[str]
    label_kinds: npt.NDArray[np.uint8]
    sources: npt.NDArray[np.int32]
    source_names: list[str]
    rows: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    """(N,) place among the rows that were cut into columns, good or not."""
    num_cut: int
    num_raw: int


class SplitPlan:
    """Which split each row goes to. Computed when first asked for, in one pass."""

    def __init__(
        self, raw: RawTexts, columns: Columns, settings: SplitSettings
    ) -> None:
        columns.check_present(raw)
        self.raw, self.columns, self.settings = raw, columns, settings

    @cached_property
    def _read(self) -> tuple[_Facts, list[Any]]:
        return _first_pass(self.raw, self.columns)

    @cached_property
    def _decided(self) -> tuple[Codes, list[Any]]:
        """Codes (N,) of the good rows, and batches of rows rejected on the whole."""
        facts, _ = self._read
        codes = _assign(facts, self.settings)
        codes[_repeats(facts.exact)] = DUPLICATE
        late = []
        if self.columns.label and not self.columns.regression:
            late = [*_reject_odd_kinds(facts, codes), *_reject_unseen(facts, codes)]
        return codes, late

    @cached_property
    def codes(self) -> Codes:
        """(rows cut into columns,) 0, 1, 2 for the splits, REJECTED or DUPLICATE."""
        facts, _ = self._read
        codes = np.full(facts.num_cut, REJECTED, np.int8)
        codes[facts.positions] = self._decided[0]
        return codes

    @cached_property
    def rejected(self) -> Any:
        """Table with REJECTED_SCHEMA of every row that cannot be used."""
        batches = [*self._read[1], *self._decided[1]]
        return pa.Table.from_batches(batches, REJECTED_SCHEMA)

    @cached_property
    def report(self) -> dict[str, Any]:
        """Counts, shares and leaks; checks that no row is unaccounted for."""
        return _report(self._read[0], self._decided[0], self.rejected)

    def check_usable(self) -> None:
        """Raises SplitError where too much was rejected, or a split is unusable."""
        report, settings = self.report, self.settings
        if report["rows_in"] == 0:
            raise SplitError("raw_texts is empty: it has columns but no rows")
        share = report["rejected"] / report["rows_in"]
        if share > settings.max_rejected_fraction:
            raise SplitError(_too_many(report, self.rejected, settings, share))
        if self.columns.label and not self.columns.regression:
            _check_labels(report)
        empty = [name for name in SPLITS if report["rows_out"][name] == 0]
        if empty:
            raise SplitError(
                f"no row fell into {' and '.join(empty)}: {report['rows_in']} rows are "
                "too few for split.fractions. Give more rows or raise the fraction"
            )


def _first_pass(raw: RawTexts, columns: Columns) -> tuple[_Facts, list[Any]]:
    collected = _Collector()
    for batch in raw.batches(columns.names):
        checked = check_batch(batch, columns)
        collected.add(checked, batch.source, len(batch.rows), len(batch.broken))
    return collected.facts(), collected.rejected


class _Collector:
    """Gathers _Facts batch by batch."""

    def __init__(self) -> None:
        self.parts: dict[str, list[npt.NDArray[Any]]] = {}
        self.label_codes: dict[str, int] = {}
        self.source_codes: dict[str, int] = {}
        self.rejected: list[Any] = []
        self.num_cut = self.num_raw = 0

    def add(self, checked: CheckedBatch, source: str, cut: int, broken: int) -> None:
        table = checked.table
        exact, near = content_hashes(table)
        code = self.source_codes.setdefault(source, len(self.source_codes))
        self._keep(
            exact=exact,
            near=near,
            label_kinds=checked.label_kinds,
            labels=self._label_codes(table),
            sources=np.full(table.num_rows, code, np.int32),
            rows=table.column("source_row").to_numpy(),
            positions=np.flatnonzero(checked.good) + self.num_cut,
        )
        if checked.groups is not None:
            self._keep(groups=_group_hashes(checked.groups))
        if checked.rejected.num_rows:
            self.rejected.append(checked.rejected)
        self.num_cut += cut
        self.num_raw += cut + broken

    def _keep(self, **arrays: npt.NDArray[Any]) -> None:
        for name, array in arrays.items():
            self.parts.setdefault(name, []).append(array)

    def _label_codes(self, table: Any) -> npt.NDArray[np.int32]:
        if "label" not in table.schema.names or not pa.types.is_string(
            table.column("label").type
        ):
            return np.zeros(table.num_rows, np.int32)
        encoded = table.column("label").dictionary_encode()
        codes = [
            self.label_codes.setdefault(name, len(self.label_codes))
            for name in encoded.dictionary.to_pylist()
        ]
        found: npt.NDArray[np.int32] = np.array(codes, np.int32)[
            encoded.indices.to_numpy(zero_copy_only=False)
        ]
        return found

    def facts(self) -> _Facts:
        if not self.parts:
            raise SplitError("raw_texts is empty: it has columns but no rows")
        joined: dict[str, Any] = {
            name: np.concatenate(parts) for name, parts in self.parts.items()
        }
        return _Facts(
            **{"groups": None, **joined},
            label_names=list(self.label_codes),
            source_names=list(self.source_codes),
            num_cut=self.num_cut,
            num_raw=self.num_raw,
        )


def content_hashes(table: Any) -> tuple[Hashes, Hashes]:
    """Exact (N, 2) and near (N,) hashes of the texts of N rows."""
    texts = table.column("text").to_pylist()
    if "text_pair" in table.schema.names:
        pairs = table.column("text_pair").to_pylist()
        texts = [f"{a}\x1f{b}" for a, b in zip(texts, pairs, strict=True)]
    digests = b"".join([xxhash.xxh3_128_digest(text.encode()) for text in texts])
    near = [xxhash.xxh3_64_intdigest(one_form(text).encode()) for text in texts]
    exact = np.frombuffer(digests, np.uint64).reshape(-1, 2)
    return exact, np.array(near, np.uint64)


def one_form(text: str) -> str:
    """Text without differences of case, white space and Unicode composition."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _group_hashes(groups: Any) -> Hashes:
    names = map(str, groups.to_pylist())
    return np.array([xxhash.xxh3_64_intdigest(n.encode()) for n in names], np.uint64)


def _assign(facts: _Facts, settings: SplitSettings) -> Codes:
    """Split codes (N,) from the hashes alone."""
    hashes = facts.near if facts.groups is None else facts.groups
    fractions = settings.fractions
    bounds = np.array([fractions.train, fractions.train + fractions.validation])
    places = _scrambled(hashes, settings.seed).astype(np.float64) / 2.0**64
    codes: Codes = np.searchsorted(bounds, places, side="right").astype(np.int8)
    return codes


def _scrambled(hashes: Hashes, seed: int) -> Hashes:
    """SplitMix64 of hash and seed: another seed, another independent split."""
    with np.errstate(over="ignore"):
        z = hashes + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = z ^ (z >> np.uint64(31))
    return mixed


def _repeats(exact: Hashes) -> npt.NDArray[np.bool_]:
    """(N,) true where an earlier row has the same text."""
    order = np.lexsort((exact[:, 1], exact[:, 0]))  # stable: first rows come first
    same = (exact[order[1:]] == exact[order[:-1]]).all(axis=1)
    repeats = np.zeros(len(exact), dtype=bool)
    repeats[order[1:][same]] = True
    return repeats


def _reject_odd_kinds(facts: _Facts, codes: Codes) -> list[Any]:
    """Labels that are text where most are numbers, or the other way round."""
    used = codes >= 0
    numbers = used & (facts.label_kinds == Kind.NUMBER)
    texts = used & (facts.label_kinds == Kind.TEXT)
    if not numbers.any() or not texts.any():
        return []
    if numbers.sum() >= texts.sum():
        return _reject(facts, codes, texts, "is text where most labels are numbers")
    return _reject(facts, codes, numbers, "is a number where most labels are text")


def _reject_unseen(facts: _Facts, codes: Codes) -> list[Any]:
    """Labels without a row in train: nothing could learn them."""
    size = len(facts.label_names)
    in_train = np.bincount(facts.labels[codes == 0], minlength=size) > 0
    unseen = (codes > 0) & ~in_train[facts.labels]
    return _reject(facts, codes, unseen, "has no row in the train split")


def _reject(
    facts: _Facts, codes: Codes, chosen: npt.NDArray[np.bool_], what: str
) -> list[Any]:
    codes[chosen] = REJECTED
    batches = []
    for code, source in enumerate(facts.source_names):
        here = np.flatnonzero(chosen & (facts.sources == code))
        names = [facts.label_names[label] for label in facts.labels[here]]
        rows = facts.rows[here].tolist()
        found = [
            (r, f"label {n!r} {what}", n) for r, n in zip(rows, names, strict=True)
        ]
        batches += [rejected_batch(source, found)] if found else []
    return batches


def _report(facts: _Facts, codes: Codes, rejected: Any) -> dict[str, Any]:
    out = {name: int((codes == code).sum()) for code, name in enumerate(SPLITS)}
    repeats = codes == DUPLICATE
    report = {
        "rows_in": facts.num_raw,
        "rows_out": out,
        "rejected": rejected.num_rows,
        "rejected_by_reason": _counts(rejected),
        "duplicates": int(repeats.sum()),
        **_near_duplicates(facts, codes),
        "texts_in_two_splits": _in_two_splits(facts.exact[:, 0], codes),
        "groups_in_two_splits": _in_two_splits(facts.groups, codes),
        **_label_report(facts, codes),
    }
    accounted = sum(out.values()) + report["rejected"] + report["duplicates"]
    if accounted != facts.num_raw:
        raise AssertionError(f"{facts.num_raw} rows in, {accounted} accounted for")
    if report["texts_in_two_splits"] or report["groups_in_two_splits"]:
        raise AssertionError("a text or a group is in two splits")
    return report


def _counts(rejected: Any) -> dict[str, int]:
    counted = rejected.column("reason").value_counts().to_pylist()
    pairs = [(entry["values"], entry["counts"]) for entry in counted]
    return dict(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))


def _near_duplicates(facts: _Facts, codes: Codes) -> dict[str, int]:
    """Rows that differ from an earlier kept one only in case, space or composition."""
    near = facts.near[codes >= 0]
    return {
        "near_duplicates": int(len(near) - len(np.unique(near))),
        "near_duplicates_in_two_splits": _in_two_splits(facts.near, codes),
    }


def _in_two_splits(hashes: Hashes | None, codes: Codes) -> int:
    """How many values of `hashes` are found in more than one split."""
    if hashes is None:
        return 0
    parts = [np.unique(hashes[codes == code]) for code in range(len(SPLITS))]
    together = np.concatenate(parts)
    _, counts = np.unique(together, return_counts=True)
    return int((counts > 1).sum())


def _label_report(facts: _Facts, codes: Codes) -> dict[str, Any]:
    if not facts.label_names:
        return {}
    size, shares = len(facts.label_names), {}
    for code, split in enumerate(SPLITS):
        counts = np.bincount(facts.labels[codes == code], minlength=size)
        total = max(1, int(counts.sum()))
        pairs = zip(facts.label_names, (counts / total).tolist(), strict=True)
        shares[split] = {name: round(s, 6) for name, s in sorted(pairs) if s}
    used = np.bincount(facts.labels[codes >= 0], minlength=size)
    once = [facts.label_names[i] for i in np.flatnonzero(used == 1)]
    return {
        "labels": int((used > 0).sum()),
        "label_shares": shares,
        "labels_seen_once": {n: _row_of(facts, codes, n) for n in sorted(once)},
    }


def _row_of(facts: _Facts, codes: Codes, name: str) -> int:
    index = facts.label_names.index(name)
    return int(facts.rows[(codes >= 0) & (facts.labels == index)][0])


def _check_labels(report: dict[str, Any]) -> None:
    if report["labels"] == 1:
        (name,) = report["label_shares"]["train"]
        raise SplitError(
            f"every row has the label {name!r}: there is nothing to tell apart. Check "
            "split.label_column"
        )


def _too_many(
    report: dict[str, Any], rejected: Any, settings: SplitSettings, share: float
) -> str:
    lines = []
    for reason, count in report["rejected_by_reason"].items():
        chosen = rejected.filter(pc.equal(rejected.column("reason"), reason))
        rows = ", ".join(map(str, chosen.column("row").to_pylist()[:5]))
        more = ", ..." if count > 5 else ""
        lines.append(f"  {count} x {reason}: rows {rows}{more} (counted from 0)")
    return (
        f"{report['rejected']} of {report['rows_in']} rows ({share:.1%}) cannot be "
        "used, more than split.max_rejected_fraction "
        f"{settings.max_rejected_fraction:g}:\n"
        + "\n".join(lines[:20])
        + "\nAll of them are in rejected_rows. Mend the data or the column names, or "
        "raise split.max_rejected_fraction"
    )


@dataclass(frozen=True)
class RowsRecipe(ArrowRecipe):
    """How to make the rows of one split."""

    key: ContentKey
    plan: SplitPlan
    split: str

    @property
    def schema(self) -> Any:
        return self.plan.columns.row_schema

    def batches(self) -> Iterator[Any]:
        """RecordBatches with `text`, `text_pair`, `label` (as there are) and the row
        number in the source. Raises SplitError where the rows are not usable."""
        plan, code, start = self.plan, SPLITS.index(self.split), 0
        plan.check_usable()
        for batch in plan.raw.batches(plan.columns.names):
            checked = check_batch(batch, plan.columns)
            codes = plan.codes[start : start + len(batch.rows)][checked.good]
            start += len(batch.rows)
            yield checked.table.filter(pa.array(codes == code))
        if start != len(plan.codes):
            raise SplitError("raw_texts changed while it was read: run again")


@dataclass(frozen=True)
class RejectedRecipe:
    """How to make the table of rejected rows."""

    key: ContentKey
    plan: SplitPlan

    def table(self) -> Any:
        return self.plan.rejected


@dataclass(frozen=True)
class ReportRecipe:
    """How to make the split report."""

    key: ContentKey
    plan: SplitPlan

    def value(self) -> dict[str, Any]:
        self.plan.check_usable()
        return self.plan.report


def plan_split(
    raw: RawTexts, columns: Columns, settings: SplitSettings
) -> dict[str, Any]:
    """Recipes by catalog name: rejected_rows, the three splits, split_report."""
    plan = SplitPlan(raw, columns, settings)
    fields = {
        "format": FORMAT_VERSION,
        "raw_texts": raw.digest(columns.names),
        "regression": columns.regression,
        **settings.model_dump(mode="json"),
    }
    if not columns.label:
        fields["label_column"] = None
    keys = {name: ContentKey({**fields, "result": name}) for name in _RESULTS}
    rows = {f"{s}_rows": RowsRecipe(keys[f"{s}_rows"], plan, s) for s in SPLITS}
    return {
        "rejected_rows": RejectedRecipe(keys["rejected_rows"], plan),
        **rows,
        "split_report": ReportRecipe(keys["split_report"], plan),
    }


_RESULTS = ("rejected_rows", *(f"{s}_rows" for s in SPLITS), "split_report")
__all__ = ["RawTextsError", "RowsRecipe", "SplitError", "SplitPlan", "plan_split"]
