"""Statistics of token rows, and a figure: lengths and truncation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.engine.files.content_key import ContentKey
from flatout.engine.parameters import TokenizeSettings
from flatout.engine.tokenizing.token_keys import facts_of, token_key
from flatout.engine.tokenizing.tokenizer import TokenizerFile

FORMAT_VERSION = 4
QUANTILES = {"min": 0.0, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
HISTOGRAM_BINS = 40
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenReport:
    """Recipe of the report on token rows by split."""

    tokens: Mapping[str, Any]
    """`datasets.Dataset` by split; includes `train`."""
    tokenizer: TokenizerFile
    tokenize: TokenizeSettings

    @cached_property
    def key(self) -> ContentKey:
        rows = {f"{name}_tokens": token_key(rows) for name, rows in self.tokens.items()}
        own = {"format": FORMAT_VERSION, "max_length": self.tokenize.max_length}
        return ContentKey({"tokenizer": self.tokenizer.digest, **rows, **own})

    def value(self) -> dict[str, Any]:
        """Return a dict for JSON; shares are between 0 and 1."""
        return self._value

    @cached_property
    def _value(self) -> dict[str, Any]:
        return {
            "max_length": self.tokenize.max_length,
            "splits": {name: _split(rows) for name, rows in self.tokens.items()},
            "histogram": histogram(lengths_of(self.tokens["train"])),
            "tokenizer_checks": self.tokenizer.checks,
        }


def _split(rows: Any) -> dict[str, Any]:
    cut, lengths = facts_of(rows).get("cut_rows"), lengths_of(rows)
    return {
        "rows": len(lengths),
        "tokens": int(lengths.sum()),
        "cut_rows": cut,
        "cut_share": None if cut is None else round(cut / len(lengths), 6),
        "length": length_summary(lengths),
    }


def lengths_of(tokens: Any) -> Ints:
    """Number of tokens (N,) of each row of a `datasets.Dataset`."""
    lengths: Ints = tokens.data.table.column("length").to_numpy().astype(np.int64)
    return lengths


def length_summary(lengths: Ints) -> dict[str, float]:
    found = np.quantile(lengths, list(QUANTILES.values()))
    summary = {
        name: round(float(value), 1)
        for name, value in zip(QUANTILES, found, strict=True)
    }
    return {**summary, "mean": round(float(lengths.mean()), 2)}


def histogram(lengths: Ints) -> dict[str, list[float]]:
    """`counts[i]` rows have a length in [edges[i], edges[i + 1])."""
    longest = int(lengths.max())
    width = max(1, -(-longest // HISTOGRAM_BINS))
    edges = np.arange(0, longest + width + 1, width)
    counts, _ = np.histogram(lengths, edges)
    return {"edges": edges.tolist(), "counts": counts.tolist()}


FIGURE_VERSION = 3


@dataclass(frozen=True)
class LengthFigure:
    """Recipe of the figure of the lengths."""

    report: TokenReport

    @property
    def key(self) -> ContentKey:
        return ContentKey({**self.report.key.fields, "figure": FIGURE_VERSION})

    def value(self) -> dict[str, Any]:
        """Return `data` and `layout` of a Plotly figure."""
        report = self.report.value()
        edges, train = report["histogram"]["edges"], report["splits"]["train"]
        cut, length = train["cut_share"], train["length"]
        text = f"{train['rows']:,} training rows: median {length['median']:g}, "
        text += f"mean {length['mean']:g} tokens"
        text += "" if cut is None else f", {100 * cut:.1f} % of them cut"
        bars = {"type": "bar", "x": edges[:-1], "y": report["histogram"]["counts"]}
        return {
            "data": [{**bars, "width": edges[1] - edges[0], "offset": 0}],
            "layout": {
                "title": {"text": text},
                "xaxis": {"title": {"text": "tokens of a row"}},
                "yaxis": {"title": {"text": "rows"}},
            },
        }
