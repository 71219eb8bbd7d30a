"""Figures on token rows, and a picture: lengths, cuts, vocabulary, and padding under
each strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from flatout.engine.batches.global_batches import GlobalBatches, Planner, padded_tokens
from flatout.engine.files.content_key import ContentKey
from flatout.engine.parameters import Strategy, TokenizeSettings, TrainSettings
from flatout.engine.tokenizing.token_keys import facts_of, token_key
from flatout.engine.tokenizing.tokenizer import TokenizerFile

FORMAT_VERSION = 2
QUANTILES = {"min": 0.0, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
HISTOGRAM_BINS = 40
SAMPLED_STEPS = 200
"""Global batches, evenly spaced over an epoch, behind the padding shares."""
AUTO_TOKEN_BUDGET = 8_192
"""Where `train.token_budget` is auto: what training takes on a CPU. Tokens are often
made elsewhere than they are trained on, so the report names the budget."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenReport:
    """How to make the report on token rows by split."""

    key: ContentKey
    tokens: Mapping[str, Any]
    """`datasets.Dataset` by split; `train` is one of them."""
    tokenizer: TokenizerFile
    train: TrainSettings
    tokenize: TokenizeSettings

    def value(self) -> dict[str, Any]:
        """A dict for JSON; shares are between 0 and 1."""
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
            "global_batch_size": self.train.global_batch_size,
            "token_budget": budget_of(self.train, self.tokenize.max_length),
            "padding_share": padding_shares(
                lengths["train"], self.train, self.tokenize.max_length
            ),
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


def token_report(
    tokens: Mapping[str, Any],
    tokenizer: TokenizerFile,
    train: TrainSettings,
    tokenize: TokenizeSettings,
) -> TokenReport:
    """For token rows by split name, with the batch size and budget of `train`."""
    fields = {
        "format": FORMAT_VERSION,
        "tokenizer": tokenizer.digest,
        "max_length": tokenize.max_length,
        "global_batch_size": train.global_batch_size,
        "token_budget": train.token_budget,
        **{f"{name}_tokens": token_key(rows) for name, rows in tokens.items()},
    }
    return TokenReport(ContentKey(fields), tokens, tokenizer, train, tokenize)


def lengths_of(tokens: Any) -> Ints:
    """Tokens (N,) of each row of a `datasets.Dataset`."""
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
    """How many of `size` tokens are in `tokens` at all."""
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


def budget_of(train: TrainSettings, max_length: int) -> int:
    """Token budget behind the padding shares; at least the longest row."""
    wanted = train.token_budget
    return max(AUTO_TOKEN_BUDGET if isinstance(wanted, str) else wanted, max_length)


def padding_shares(
    lengths: Ints, train: TrainSettings, max_length: int
) -> dict[str, float]:
    """Padding over all tokens computed, by strategy, at the configured batch."""
    batches = GlobalBatches(len(lengths), train.global_batch_size, seed=0)
    steps = np.unique(
        np.linspace(0, batches.steps_per_epoch - 1, SAMPLED_STEPS).astype(np.int64)
    )
    sample = [lengths[batches.rows(int(step))] for step in steps]
    real = sum(int(part.sum()) for part in sample)
    budget, shares = budget_of(train, max_length), {}
    for strategy in get_args(Strategy):
        planner = Planner(strategy, budget, max_length)
        computed = sum(padded_tokens(planner.plan(p), p, planner) for p in sample)
        shares[strategy] = round(1 - real / computed, 6)
    return shares


FIGURE_VERSION = 2


@dataclass(frozen=True)
class LengthFigure:
    """How to make the picture of the lengths and of the padding."""

    report: TokenReport

    @property
    def key(self) -> ContentKey:
        return ContentKey({**self.report.key.fields, "figure": FIGURE_VERSION})

    def value(self) -> dict[str, Any]:
        """`data` and `layout` of a Plotly figure: two panels side by side."""
        report = self.report.value()
        edges, counts = report["histogram"]["edges"], report["histogram"]["counts"]
        shares = report["padding_share"]
        return {
            "data": [
                {
                    "type": "bar",
                    "x": edges[:-1],
                    "y": counts,
                    "width": edges[1] - edges[0],
                    "offset": 0,
                    "name": "rows",
                    "hovertemplate": "from %{x} tokens: %{y} rows<extra></extra>",
                },
                {
                    "type": "bar",
                    "x": list(shares),
                    "y": [100 * share for share in shares.values()],
                    "xaxis": "x2",
                    "yaxis": "y2",
                    "text": [f"{100 * share:.1f} %" for share in shares.values()],
                    "name": "padding",
                },
            ],
            "layout": _layout(report),
        }


def _layout(report: dict[str, Any]) -> dict[str, Any]:
    train, cut = report["splits"]["train"], report["splits"]["train"]["cut_share"]
    median, mean = train["length"]["median"], train["length"]["mean"]
    text = f"{train['rows']:,} training rows: median {median:g}, mean {mean:g} tokens"
    text += "" if cut is None else f", {100 * cut:.1f} % of them cut"
    batch = f"batch {report['global_batch_size']}, "
    batch += f"token budget {report['token_budget']:,}"
    return {
        "title": {"text": text},
        "showlegend": False,
        "xaxis": {"domain": [0, 0.62], "title": {"text": "tokens of a row"}},
        "yaxis": {"title": {"text": "rows"}},
        "xaxis2": {
            "domain": [0.72, 1],
            "title": {"text": f"strategy, {batch}"},
        },
        "yaxis2": {"anchor": "x2", "title": {"text": "padding, % of computed tokens"}},
    }
