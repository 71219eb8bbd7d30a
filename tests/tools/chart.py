"""The README's chart: BERT-base at 704 rows per step on one H100 (docs/benchmarks.md).

    python -m tests.tools.chart

The SVG file adapts its colours to light and dark pages.
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path

PROJECT = Path(__file__).parents[2]
ROWS = [
    ("Trainer, random order", 1_500),
    ("Trainer, rebalanced, compiled", 2_700),
    ("packed and compiled loop", 6_481),
    ("flatout", 7_702),
]
CHART = PROJECT / "docs/pictures/rates.svg"
WIDTH, BAR, GAP, LEFT, RIGHT = 720, 26, 12, 220, 70
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1f2328 }
.ours { fill: #1a7f37 } .theirs { fill: #8c959f }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .ours { fill: #3fb950 } .theirs { fill: #6e7681 }
}
"""


def drawn(rows: list[tuple[str, float]]) -> str:
    """Return an SVG bar chart with one bar per row."""
    most = max(rate for _, rate in rows)
    height = GAP + len(rows) * (BAR + GAP)
    parts = []
    for index, (name, rate) in enumerate(rows):
        top = GAP + index * (BAR + GAP)
        width = round((WIDTH - LEFT - RIGHT) * rate / most)
        kind = "ours" if name.startswith("flatout") else "theirs"
        middle = top + BAR / 2 + 5
        parts += [
            f'<text x="{LEFT - 10}" y="{middle}" text-anchor="end">{escape(name)}'
            "</text>",
            f'<rect class="{kind}" x="{LEFT}" y="{top}" width="{width}" '
            f'height="{BAR}" rx="3"/>',
            f'<text x="{LEFT + width + 8}" y="{middle}">{rate:,.0f}</text>',
        ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" role="img" aria-label="samples per second">'
    )
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    CHART.parent.mkdir(exist_ok=True)
    CHART.write_text(drawn(ROWS))


if __name__ == "__main__":
    main()
