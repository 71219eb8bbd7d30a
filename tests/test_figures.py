"""Figures of the documents stand in the results log, in the page that is linked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.documents import documents

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
def test_figures_of_the_first_page_are_in_a_table_of_the_page_that_it_links(name):
    text = (PROJECT / name).read_text()
    rows = [line for line in text.splitlines() if line[:1] == "|"]
    found = {figure[1] for row in rows for figure in FIGURE.finditer(row)}
    linked = [PROJECT / t for t in LINK.findall(text) if not t.endswith("README.md")]
    known = [row for page in linked for row in page.read_text().splitlines()]
    in_tables = {n for row in known if row[:1] == "|" for n in re.findall(NUMBER, row)}
    assert name.endswith("ko.md") or len(found) > 5
    assert found <= in_tables


RATIO = re.compile(rf"(?<![\d.,-])({NUMBER}) times\]?((?: [\w`'-]+){{2}})")
"""`3.3 times a plain loop`: the number, and the words that say of what."""


def test_a_ratio_has_one_value_in_all_documents():
    """Said of the same thing, with the same page of the log behind it."""
    found: dict[tuple[str, ...], set[str]] = {}
    for page in PAGES:
        of = page.stem if page.parent.name == "optimisations" else ""
        for text in paragraphs(page):
            links = sorted({Path(target).name for target in LINK.findall(text)})
            for ratio in RATIO.finditer(text) if links else ():
                found.setdefault((of, *links, ratio[2].strip()), set()).add(ratio[1])
    assert len(found) > 5
    assert {key: values for key, values in found.items() if len(values) > 1} == {}


OPTIMISATIONS = PROJECT / "docs" / "optimisations"
PAGES_OF_ONE = sorted(p for p in OPTIMISATIONS.glob("*.md") if p.stem != "README")


def gains() -> dict[str, set[str]]:
    """Figures of each optimisation in the list of all, by its page."""
    rows = (OPTIMISATIONS / "README.md").read_text().splitlines()
    found = {}
    for row in rows:
        if name := re.search(r"\((\w+)\.md\) \|$", row):
            figures = re.findall(NUMBER, " ".join(row.split("|")[2:4]))
            found[name[1]] = {figure for figure in figures if len(figure) > 1}
    return found


@pytest.mark.parametrize("page", PAGES_OF_ONE, ids=lambda p: p.stem)
def test_the_list_of_optimisations_says_what_their_pages_say(page):
    """The figure of the page, or the ratio of its two rates, times or memories."""
    measured = page.read_text().partition("**Measured.**")[2].split(" [Figures]")[0]
    own = [number_of(n) for n in re.findall(rf"(?<![\w-]){NUMBER}", measured)]
    ratios = {str(a / b) for a in own for b in own if a != b}
    listed = {n for n in gains()[page.stem] if stands_in(n, {*map(str, own), *ratios})}
    assert listed or measured.startswith(" Not measured.")


def test_other_documents_give_the_gains_of_that_list():
    wrong, checked, known = [], 0, gains()
    for page in PAGES:
        for text in paragraphs(page) if page.parent != OPTIMISATIONS else ():
            linked = re.findall(r"\]\([./\w]*optimisations/(\w+)\.md\)", text)
            figures = re.findall(r"(?<![\d.-])\d\.\d\d(?![\d.]*x)", text)
            for figure in figures if set(linked) & known.keys() else ():
                checked += 1
                if not any(figure in known[name] for name in linked):
                    wrong.append((page.name, figure, linked))
    assert checked > 10
    assert wrong == []
