"""Detection of abnormal sessions of log keys: those with a key that is not among the g
likeliest after the keys before it (DeepLog, Du et al. 2017), and those that break
off."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.data.raw_texts import RawTexts, RawTextsError, open_raw_texts
from flatout.engine.data.sessions.parts import ABNORMAL
from flatout.engine.models.building import ModelError
from flatout.engine.parameters import DetectSettings, Settings
from flatout.engine.predict.predicting import Predictions, predict
from flatout.engine.tokenizing.tokenizer import TokenizerFile

logger = logging.getLogger(__name__)

ENTRY = "detect_sessions"
END = "the end"
"""Listed instead of a key if the session ends before an expected key."""
LISTED = 1_000
"""Most false alarms in their file; the table of all sessions has the others."""
MOST_TOP_KEYS = 30
"""Largest `detect.top_keys` for which the report lists figures."""


@dataclass(frozen=True)
class Detection:
    """Result of a detection."""

    sessions: Any
    """Arrow table, one row per session: source, row, session, label, abnormal, rank,
    place, key, end_probability, reason. Rank and place: of its least expected key."""
    report: dict[str, Any]
    false_alarms: list[dict[str, Any]]


def detect(
    model: Any, tokenizer: TokenizerFile, sessions: Any, settings: Settings
) -> Detection:
    """Evaluate `sessions` (any input of `open_raw_texts`) with a saved model. Raises
    ModelError, RawTextsError, SettingsError."""
    raw = open_raw_texts(sessions, ENTRY)
    named = {"id_column": settings.split.group_column, "keep_text": True}
    own = settings.predict.model_copy(update=named)
    found = predict(model, tokenizer, raw, settings.model_copy(update={"predict": own}))
    if "rank" not in found.schema.names:
        raise ModelError(
            "detect takes models that rank each key of a session, and the one of the "
            "catalog does not: kedro run --env=deeplog trains one"
        )
    labels = _labels(raw, settings.detect.label_column, own.id_column)
    table = _judged(found, labels, settings.detect)
    report = _report(table, settings.detect.top_keys)
    report["cut_sessions"] = sum(
        _is_cut(text or "", found.predictor.max_length)
        for text in table.column("text").to_pylist()
    )
    _log(report)
    alarms = _false_alarms(table)
    return Detection(table.drop_columns(["text"]), report, alarms)


_Labels = dict[tuple[str, int, str | None], str]
"""Labels by source, row and session: a line may begin several sessions."""


def _labels(raw: RawTexts, column: str | None, session: str | None) -> _Labels:
    if column is None:
        return {}
    if column not in raw.column_names:
        raise RawTextsError(
            f"{ENTRY} has no column {column!r}: set detect.label_column; null where "
            "nobody knows which sessions are abnormal"
        )
    found: _Labels = {}
    for batch in raw.batches([column, *([session] if session else [])]):
        rows, labels = batch.rows.tolist(), batch.columns[column].to_pylist()
        nameless = [None] * len(rows)
        names = batch.columns[session].to_pylist() if session else nameless
        for row, label, name in zip(rows, labels, names, strict=True):
            if label is not None:
                found[batch.source, row, name] = label
    return found


def _judged(found: Predictions, labels: _Labels, detect: DetectSettings) -> Any:
    """Return the table of `Detection.sessions`, with the text."""
    parts = [SCHEMA.empty_table()]
    for batch in found.batches():
        rows = batch.to_pylist()
        for row in rows:
            row["session"] = row.pop("id", None)
            row["label"] = labels.get((row["source"], row["row"], row["session"]))
            row.update(_judge(row, detect, found.predictor.max_length))
        parts.append(pa.Table.from_pylist(rows, schema=SCHEMA))
    return pa.concat_tables(parts)


SCHEMA = pa.schema(
    {
        "source": pa.string(),
        "row": pa.int64(),
        "session": pa.string(),
        "label": pa.string(),
        "abnormal": pa.bool_(),
        "rank": pa.int64(),
        "place": pa.int64(),
        "key": pa.string(),
        "end_probability": pa.float32(),
        "breaks_off": pa.bool_(),
        "text": pa.string(),
        "reason": pa.string(),
    }
)


def _judge(row: dict[str, Any], detect: DetectSettings, most: int) -> dict[str, Any]:
    """Return columns of one session; empty if unusable. A cut session has no end."""
    text, rank, place = row["text"], row["rank"], row["place"]
    if text is None or rank is None:
        return {}
    keys = text.split()
    ends_early = row["end_probability"] < detect.min_end_probability
    breaks_off = ends_early and not _is_cut(text, most)
    if breaks_off and rank < detect.top_keys:
        place = len(keys) + 1
    return {
        "abnormal": rank >= detect.top_keys or breaks_off,
        "place": place,
        "key": (*keys, END)[place - 1],
        "breaks_off": breaks_off,
    }


def _report(table: Any, top_keys: int) -> dict[str, Any]:
    """Return the report. A session that breaks off is always abnormal."""
    usable = table.filter(table.column("rank").is_valid())
    told = usable.filter(usable.column("label").is_valid())
    breaks_off = told.column("breaks_off").to_numpy()
    ranks = np.where(breaks_off, np.inf, told.column("rank").to_numpy())
    truth = np.array([label == ABNORMAL for label in told.column("label").to_pylist()])
    every = range(1, max(MOST_TOP_KEYS, top_keys) + 1)
    return {
        "sessions": table.num_rows,
        "unusable": table.num_rows - usable.num_rows,
        "without_label": usable.num_rows - told.num_rows,
        "abnormal_found": sum(usable.column("abnormal").to_pylist()),
        "breaks_off": sum(usable.column("breaks_off").to_pylist()),
        **_figures(ranks, truth, top_keys),
        "by_top_keys": [_figures(ranks, truth, limit) for limit in every],
    }


def _figures(
    ranks: npt.NDArray[Any], truth: npt.NDArray[np.bool_], top_keys: int
) -> dict[str, Any]:
    """Return figures of labelled sessions; None for a figure without any session."""
    truth = truth.astype(bool)
    found = ranks >= top_keys
    right, wrong = int((found & truth).sum()), int((found & ~truth).sum())
    missed, total = int((~found & truth).sum()), len(ranks)
    return {
        "top_keys": top_keys,
        "true_alarms": right,
        "false_alarms": wrong,
        "missed": missed,
        "rightly_silent": total - right - wrong - missed,
        "precision": _share(right, right + wrong),
        "recall": _share(right, right + missed),
        "f1": _share(2 * right, 2 * right + wrong + missed),
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _is_cut(text: str, max_length: int) -> bool:
    """Return whether only the first keys of a session fit; start and end count, too."""
    return len(text.split()) + 2 > max_length


def _log(report: dict[str, Any]) -> None:
    shown = {name: report[name] for name in ("precision", "recall", "f1")}
    figures = ", ".join(
        f"{name} {'unknown' if value is None else f'{value:.4f}'}"
        for name, value in shown.items()
    )
    logger.info(
        "%s of %s sessions have a key that is none of the %s likeliest, or break off "
        "(%s): %s; %s false alarms",
        f"{report['abnormal_found']:,}",
        f"{report['sessions']:,}",
        report["top_keys"],
        f"{report['breaks_off']:,}",
        figures,
        f"{report['false_alarms']:,}",
    )
    if report["cut_sessions"]:
        logger.warning(
            "%s sessions are longer than tokenize.max_length: only their first keys "
            "were judged. Raise it, and train again",
            f"{report['cut_sessions']:,}",
        )


def _false_alarms(table: Any) -> list[dict[str, Any]]:
    """Return the false alarms, the least expected first."""
    labels = table.column("label").to_pylist()
    found = table.column("abnormal").to_pylist()
    chosen = [
        at
        for at, (label, alarm) in enumerate(zip(labels, found, strict=True))
        if alarm and label is not None and label != ABNORMAL
    ]
    shown = table.select(["source", "row", "session", "rank", "place", "key", "text"])
    rows: list[dict[str, Any]] = shown.take(pa.array(chosen, pa.int64())).to_pylist()
    rows.sort(key=lambda row: (-row["rank"], row["source"], row["row"]))
    return rows[:LISTED]
