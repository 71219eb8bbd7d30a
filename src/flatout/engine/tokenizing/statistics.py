"""Statistics of token rows, and a figure: lengths, truncation, use of vocabulary."""

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

FORMAT_VERSION = 3
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
        lengths = {name: lengths_of(rows) for name, rows in self.tokens.items()}
        vocabulary = self.tokenizer.backend.get_vocab_size()
        return {
            "max_length": self.tokenize.max_length,
            "splits": {
                name: self._split(rows, lengths[name])
                for name, rows in self.tokens.items()
            },
            "vocabulary": vocabulary_use(self.tokens["train"], vocabulary),
            "histogram": histogram(lengths["train"]),
            "tokenizer_checks": self.tokenizer.checks,
        }

    def _split(self, rows: Any, lengths: Ints) -> dict[str, Any]:
        cut = facts_of(rows).get("cut_rows")
        unknown = self.tokenizer.token_id("unk_token")
        return {
            "rows": len(lengths),
            "tokens": int(lengths.sum()),
            "cut_rows": cut,
            "cut_share": None if cut is None else round(cut / len(lengths), 6),
            "unknown_share": _share_of_token(rows, unknown),
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


def vocabulary_use(tokens: Any, size: int) -> dict[str, Any]:
    """Number of the `size` vocabulary tokens that occur in `tokens`."""
    counts = np.zeros(size, np.int64)
    for ids in _id_chunks(tokens):
        counts += np.bincount(ids, minlength=size)[:size]
    used = int((counts > 0).sum())
    return {"size": size, "used": used, "used_share": round(used / size, 6)}


def _share_of_token(tokens: Any, token_id: int | None) -> float | None:
    if token_id is None:
        return None
    found = total = 0
    for ids in _id_chunks(tokens):
        found += int((ids == token_id).sum())
        total += len(ids)
    return round(found / max(1, total), 6)


def _id_chunks(tokens: Any) -> list[npt.NDArray[np.int32]]:
    """Token ids (T,) of each record batch, views of Arrow's buffers."""
    return [
        chunk.flatten().to_numpy()
        for chunk in tokens.data.table.column("input_ids").chunks
    ]


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
