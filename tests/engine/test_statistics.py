"""Statistics of token rows, compared with counts by hand."""

import json

import datasets
import numpy as np
import pytest

from flatout.engine.files.arrow_folder import write_recipe
from flatout.engine.parameters import ModelSettings, TokenizeSettings
from flatout.engine.tokenizing.statistics import (
    histogram,
    length_summary,
    token_report,
)
from flatout.engine.tokenizing.token_recipes import tokens_recipe
from flatout.reports.pictures import length_figure
from tests.make import saved_tokenizer


def test_lengths():
    assert length_summary(np.array([1, 2, 3, 4, 10])) == {
        "min": 1.0,
        "median": 3.0,
        "p90": 7.6,
        "p99": 9.8,
        "max": 10.0,
        "mean": 4.0,
    }


def test_a_histogram_counts_every_row_once():
    lengths = np.array([1, 1, 5, 80])
    found = histogram(lengths)
    assert sum(found["counts"]) == 4
    assert (found["edges"][1], found["counts"][0], found["counts"][2]) == (2, 2, 1)
    assert found["edges"][-1] > 80


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A report on real token rows of three splits on disk."""
    folder = tmp_path_factory.mktemp("data")
    model = ModelSettings(config={"model_type": "bert"})
    tokenize = TokenizeSettings(max_length=8, vocab_size=64)
    rows = datasets.Dataset.from_dict({"text": ["a b c"] * 6 + ["a b c d e f g h"] * 2})
    tokenizer = saved_tokenizer(folder / "tokenizer", rows, model, tokenize)
    tokens = {}
    for name in ("train", "validation", "test"):
        recipe = tokens_recipe(f"{name}_tokens", rows, tokenizer, [], model, tokenize)
        write_recipe(folder / name, recipe)
        tokens[name] = datasets.load_from_disk(str(folder / name))
    return token_report(tokens, tokenize.max_length)


def test_a_report_on_stored_tokens(stored):
    train = stored["splits"]["train"]
    assert (train["rows"], train["tokens"]) == (8, 6 * 5 + 2 * 8)
    assert (train["cut_rows"], train["cut_share"]) == (2, 0.25)
    json.dumps(stored)


def test_the_figure_has_every_row(stored):
    figure = length_figure(stored)
    assert sum(figure.data[0].y) == 8
    assert figure.layout.title.text == (
        "8 training rows: median 5, mean 5.75 tokens, 25.0 % of them cut"
    )
