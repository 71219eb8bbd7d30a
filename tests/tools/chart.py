"""The README's chart, from the first table of a page of the results log.

    python -m tests.tools.chart

One SVG for light and dark pages: its colours follow the reader's.
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path

PROJECT = Path(__file__).parents[2]
PAGE = PROJECT / "docs/results/2026-11-22_headline_h200.md"
CHART = PROJECT / "docs/pictures/rates.svg"
WIDTH, BAR, GAP, LEFT, RIGHT = 720, 26, 12, 190, 70
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1f2328 }
.ours { fill: #1a7f37 } .theirs { fill: #8c959f }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .ours { fill: #3fb950 } .theirs { fill: #6e7681 }
}
"""


def rates(page: str) -> list[tuple[str, float]]:
    """(training and batch, samples/s) of each row of the page's first table."""
    lines = page.splitlines()
    start = lines.index("| training | batch | samples/s |") + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        name, batch, rate = (cell.strip() for cell in line.strip("|").split("|"))
        rows.append((f"{name}, {batch}", float(rate.replace(",", ""))))
    return rows


def drawn(rows: list[tuple[str, float]]) -> str:
    """A bar a row."""
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
    CHART.write_text(drawn(rates(PAGE.read_text())))


if __name__ == "__main__":
    main()
