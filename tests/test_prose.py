"""Sentences of the documents: short, few figures, no words of our own."""

import re
from pathlib import Path

import pytest

from tests.conftest import PROJECT

MOST_WORDS = 25
MOST_FIGURES = 2
MOST_SENTENCES = 5
FIGURE = re.compile(r"\d[\d.,]*")
BANNED = (
    "anew",
    "for ever",
    "gone on with",
    "is held against",
    "all at once",
    "mend",
    "mended",
    "no word with",
    "is the bound",
    "hither",
    "whereof",
)
OUTSIDE = ("README.md", "CONTRIBUTING.md", "conf/README.md", "tests/README.md")
PAGES = sorted(
    page
    for page in [
        *map(PROJECT.joinpath, OUTSIDE),
        *(PROJECT / "docs").rglob("*.md"),
        *(PROJECT / "src").rglob("README.md"),
    ]
    # The log keeps figures, and the page of parameters is made from docstrings.
    if "results" not in page.parts
    and page.name != "parameters.md"
    and not page.name.endswith(".ko.md")  # words are counted otherwise
)


def paragraphs(page: Path) -> list[list[str]]:
    """Sentences of the running text: no code, tables or headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        if block.lstrip().startswith(("|", "#", "!", "<")):
            continue
        plain = re.sub(r"`[^`]*`", "code", block)
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", plain)
        plain = re.sub(r"^\s*(?:[-*]|\d+\.) ", "", plain)
        found.append(re.split(r"(?<=[.!?])(?<!et al\.)\s+", " ".join(plain.split())))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(PROJECT)))
def test_sentences_are_short_and_plain(page):
    found = paragraphs(page)
    sentences = [sentence for paragraph in found for sentence in paragraph]
    long = [s for s in sentences if len(s.split()) > MOST_WORDS]
    full = [s for s in sentences if len(FIGURE.findall(s)) > MOST_FIGURES]
    crowded = [p[0] for p in found if len(p) > MOST_SENTENCES]
    banned = [w for w in BANNED for s in sentences if re.search(rf"\b{w}\b", s.lower())]
    assert (long, full, crowded, banned) == ([], [], [], [])


def test_the_readme_fits_a_screenful_or_two():
    assert len((PROJECT / "README.md").read_text().splitlines()) <= 120
