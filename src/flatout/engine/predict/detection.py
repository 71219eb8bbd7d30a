"""Detection of abnormal sessions of log keys.

A session is abnormal if one of its keys is not among the g most likely keys given the
preceding keys (DeepLog, Du et al. 2017), or if it ends too early.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from flatout.engine.data.raw_texts import RawTexts, RawTextsError, open_raw_texts
from flatout.engine.data.sessions.grouping import ABNORMAL
from flatout.engine.models.building import ModelError
from flatout.engine.parameters import DetectSettings, Settings
from flatout.engine.predict.predicting import predict
from flatout.engine.tokenizing.tokenizer import TokenizerFile

logger = logging.getLogger(__name__)
ENTRY = "detect_sessions"
END = "the end"
"""The value of the column `key` if a session ends too early."""
MOST_TOP_KEYS = 30
"""The report lists metrics for each `detect.top_keys` from 1 to this value."""
NUMBERED = ["source", "row", "session"]
COLUMNS = [
    *NUMBERED,
    *("label", "abnormal", "rank", "place", "key"),
    *("end_probability", "breaks_off", "reason"),
]
NULLABLE = {"abnormal": "boolean", "breaks_off": "boolean"}
NULLABLE |= {"rank": "Int64", "place": "Int64"}
"""The dtypes of columns that are null for unusable sessions."""


def detect(
    model: Any, tokenizer: TokenizerFile, sessions: Any, settings: Settings
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Classify `sessions` (any input of `open_raw_texts`) with a saved model. Return a
    table with the columns COLUMNS and one row per session, and the report. `place` is
    the position (from 1) of the least expected key of a session, and `rank` is the rank
    (from 0) of this key in the prediction. Raises ModelError, RawTextsError or
    SettingsError if an input is unsuitable."""
    raw, session = open_raw_texts(sessions, ENTRY), settings.split.group_column
    own = {"predict.id_column": session, "predict.keep_text": True}
    found = predict(model, tokenizer, raw, settings.changed(own))
    if "rank" not in found.schema.names:
        raise ModelError(
            "detect needs a model that ranks each key of a session, and the catalog "
            "entry model is another one: kedro run --env=deeplog trains such a model"
        )
    labels = _labels(raw, settings.detect.label_column, session)
    rows = pa.Table.from_batches(found.batches(), found.schema).to_pandas()
    rows = rows.rename(columns={"id": "session"})
    if session is None:
        rows["session"] = None
    rows["label"] = None
    if labels is not None:
        rows = rows.drop(columns="label").merge(labels, "left", NUMBERED)
    table = _judge_sessions(rows, settings.detect, found.predictor.max_length)
    report = _report(table, settings.detect.top_keys)
    _log(report)
    return table[COLUMNS].astype(NULLABLE), report


def _labels(
    raw: RawTexts, column: str | None, session: str | None
) -> pd.DataFrame | None:
    """Return the label of each session, identified by source, row and name (several
    sessions may begin in one line), or None without a label column."""
    if column is None:
        return None
    if column not in raw.column_names:
        raise RawTextsError(
            f"{ENTRY} has no column {column!r}: set detect.label_column, or null "
            "if the sessions have no labels"
        )
    parts = []
    for batch in raw.batches([column, *([session] if session else [])]):
        texts = {n: c.cast(pa.string()).to_pandas() for n, c in batch.columns.items()}
        part = pd.DataFrame({"row": batch.rows}).assign(
            source=batch.source,
            session=texts[session] if session else None,
            label=texts[column],
        )
        parts.append(part)
    return pd.concat(parts).drop_duplicates(NUMBERED, keep="last") if parts else None


def _judge_sessions(
    rows: pd.DataFrame, detect: DetectSettings, most: int
) -> pd.DataFrame:
    """Return `rows` with columns that state whether and why each session is abnormal.
    These columns are null for unusable sessions. Truncated sessions are never reported
    as ending too early."""
    good = rows[rows["rank"].notna()]
    keys = good["text"].str.split()
    count = keys.map(len)
    is_cut = count + 2 > most  # including the start and end tokens
    breaks_off = (good["end_probability"] < detect.min_end_probability) & ~is_cut
    unexpected = good["rank"] >= detect.top_keys
    at_the_end = breaks_off & ~unexpected
    place = good["place"].mask(at_the_end, count + 1).astype(int)
    found = pd.DataFrame(
        {
            "abnormal": unexpected | breaks_off,
            "place": place,
            "key": [(*k, END)[at - 1] for k, at in zip(keys, place, strict=True)],
            "breaks_off": breaks_off,
            "is_cut": is_cut,
        },
        index=good.index,
    )
    return rows.drop(columns="place").join(found)


def _report(table: pd.DataFrame, top_keys: int) -> dict[str, Any]:
    """Return the report: counts of sessions and of unusable rows, and metrics for
    `top_keys` and for other values. Sessions that end too early are abnormal for any
    value."""
    usable = table[table["rank"].notna()]
    known = usable[usable["label"].notna()]
    ranks = known["rank"].mask(known["breaks_off"].astype(bool), np.inf)
    truth = known["label"] == ABNORMAL
    every = range(1, max(MOST_TOP_KEYS, top_keys) + 1)
    return {
        "sessions": len(usable),
        "unusable": len(table) - len(usable),
        "without_label": len(usable) - len(known),
        "abnormal_found": int(usable["abnormal"].sum()),
        "breaks_off": int(usable["breaks_off"].sum()),
        "cut_sessions": int(usable["is_cut"].sum()),
        **_figures(ranks, truth, top_keys),
        "by_top_keys": [_figures(ranks, truth, limit) for limit in every],
    }


def _figures(ranks: pd.Series, truth: pd.Series, top_keys: int) -> dict[str, Any]:
    """Return metrics of the labelled sessions. `ranks` contains the rank of each
    session's least expected key. `truth` contains whether each session is abnormal.
    Ratios that divide by zero are None."""
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


def _log(report: dict[str, Any]) -> None:
    figures = ", ".join(
        f"{name} {'unknown' if report[name] is None else f'{report[name]:.4f}'}"
        for name in ("precision", "recall", "f1")
    )
    logger.info(
        "%d of %d sessions have a key outside of the %d likeliest, or end too early "
        "(%d): %s; %d false alarms",
        *(report[n] for n in ("abnormal_found", "sessions", "top_keys", "breaks_off")),
        figures,
        report["false_alarms"],
    )
    if report["cut_sessions"]:
        logger.warning(
            "%d sessions are longer than tokenize.max_length: only their first keys "
            "were evaluated. Raise it, and train again",
            report["cut_sessions"],
        )
