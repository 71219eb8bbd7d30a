"""The built-in corpus has real text of the installed packages and is reproducible."""

from collections import Counter
from pathlib import Path

import pytest
from kedro.io import DatasetError

from flatout.datasets import DocstringCorpus, docstring_corpus
from flatout.datasets._docstrings import docstrings
from flatout.datasets.docstring_corpus import _table
from tests.conftest import CORPUS


def load(folder: Path):
    return DocstringCorpus(filepath=str(folder), **CORPUS).load()


def test_rows_are_balanced_distinct_and_labelled_by_package(corpus):
    rows = load(corpus)
    assert Counter(rows["label"][:]) == dict.fromkeys(
        ("torch", "transformers", "sympy", "sklearn"), 100
    )
    assert len(set(rows["text"][:])) == 400


@pytest.mark.parametrize(("rows", "few"), [(200, 10), (15, 7), (None, 10)])
def test_other_labels_have_more_rows_if_one_has_few(monkeypatch, rows, few):
    texts = {"a": [f"a{n}" for n in range(300)], "b": [f"b{n}" for n in range(10)]}
    monkeypatch.setattr(
        "flatout.datasets.docstring_corpus._gather", lambda *_, **__: texts
    )
    labels = Counter(_table(["a", "b"], rows)["label"].to_pylist())
    assert labels == {"a": (rows or 310) - few, "b": few}


def test_the_rows_are_the_same_each_time_and_read_from_the_cache(
    corpus, tmp_path, caplog
):
    caplog.set_level("INFO")
    again = load(corpus)
    assert "docstrings: unchanged, read from" in caplog.text
    afresh = load(tmp_path)
    assert "docstrings: parsing torch, transformers" in caplog.text
    assert again.to_dict() == afresh.to_dict()


def stopped_at_0(chunk: list[Path]) -> list[str]:
    chunk[0].touch()
    if chunk[0].name == "0":
        raise KeyboardInterrupt
    return []


@pytest.mark.process
def test_ctrl_c_does_not_wait_for_all_chunks(tmp_path, monkeypatch):
    chunks = [[tmp_path / str(number)] for number in range(20_000)]
    monkeypatch.setattr(docstring_corpus, "_chunks", lambda _: chunks)
    monkeypatch.setattr(docstring_corpus, "docstrings_of", stopped_at_0)
    with pytest.raises(KeyboardInterrupt):
        _table(["a"], None)
    assert len(list(tmp_path.iterdir())) < len(chunks)


def test_the_corpus_is_read_only(tmp_path):
    with pytest.raises(DatasetError, match="read-only"):
        DocstringCorpus(filepath=str(tmp_path)).save("rows")


def test_more_labels_than_packages(tmp_path):
    with pytest.raises(
        DatasetError, match=r"corpus\.labels is 99, and 12 of the packages"
    ):
        DocstringCorpus(filepath=str(tmp_path), labels=99).load()


def test_docstrings_are_whole_and_broken_files_give_none(tmp_path):
    good = tmp_path / "good.py"
    good.write_text(
        '"""Module text of\n\n    three lines."""\nclass A:\n    """Only two."""\n'
        "    def f(self):\n        '''A method's own text.'''\n"
    )
    assert docstrings(good) == [
        "Module text of\n\nthree lines.",
        "A method's own text.",
    ]
    bad = tmp_path / "bad.py"
    bad.write_text("def (")
    assert docstrings(bad) == []
