"""Figures as Plotly's JSON, made without importing Plotly (which takes a second)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flatout.engine.files.content_key import ContentKey
from flatout.engine.tokenizing.statistics import TokenReport

FORMAT_VERSION = 2


@dataclass(frozen=True)
class LengthFigure:
    """How to make the picture of the lengths and of the padding."""

    report: TokenReport

    @property
    def key(self) -> ContentKey:
        return ContentKey({**self.report.key.fields, "figure": FORMAT_VERSION})

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
