"""Figures of the documents stand in the results log, in the page that is linked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.documents import documents

LOG = PROJECT / "docs" / "results"
NUMBER = r"\d[\d,]*(?:\.\d+)?"
FIGURE = re.compile(
    rf"(?<![\d.,])({NUMBER}) ?(?:samples/s|tokens/s|GiB|ms|TFLOP/s|times|%|s\b)"
)
LINK = re.compile(r"\]\(([^)]*results/[^)#]+\.md)[^)]*\)")
PAGES = [page for page in documents() if page.name != "parameters.md"]
NOT_IN_A_CELL = {"90 %", "5 %", "7.4 ms"}
"""Limits of settings, and a sum of forward and backward."""


def stands_in(figure: str, known: set[str]) -> bool:
    """As it is, or rounded from there."""
    value, digits = number_of(figure), len(figure.partition(".")[2])
    return figure in known or any(round(number_of(n), digits) == value for n in known)


def number_of(text: str) -> float:
    return float(text.replace(",", ""))


def numbers(*pages: Path) -> set[str]:
    return {n for page in pages for n in re.findall(NUMBER, page.read_text())}


def paragraphs(page: Path) -> list[str]:
    """Of a table each line."""
    return re.split(r"\n\s*\n|\n(?=\||\s*[-*] )", page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(PROJECT)))
def test_figures_beside_a_link_to_the_log_are_in_that_page(page):
    missing = []
    for text in paragraphs(page):
        links = [page.parent / target for target in LINK.findall(text)]
        known = numbers(*(link for link in links if link.name != "README.md"))
        for found in FIGURE.finditer(text):
            if (
                known
                and not stands_in(found[1], known)
                and found[0] not in NOT_IN_A_CELL
            ):
                missing.append(found[0])
    assert missing == []


@pytest.mark.parametrize("name", ["README.md", "README.ko.md"])
def test_figures_of_the_first_page_are_in_the_log(name):
    rows = [s for s in (PROJECT / name).read_text().splitlines() if s[:1] == "|"]
    found = [figure[1] for row in rows for figure in FIGURE.finditer(row)]
    assert name.endswith("ko.md") or len(found) > 5
    assert set(found) <= numbers(*LOG.glob("2*.md"))
