"""The tokenize pipeline: a run on real rows, and what a change recreates."""

import datasets
import pytest
from kedro.io import DatasetError, MemoryDataset
from kedro.runner import SequentialRunner

from flatout.datasets import TokenizerFile, TokenizerFolder
from flatout.engine.parameters import parse_settings
from flatout.engine.tokenizing.token_keys import StaleTokensError
from flatout.pipelines.benchmark.nodes import run_trials
from flatout.pipelines.sweep.nodes import run_sweep
from flatout.pipelines.tokenize import create_pipeline
from flatout.pipelines.train.nodes import train_model
from tests.pipelines.tokens import text_catalog

SPLITS = ("train", "validation", "test")
MODEL = {"task": "sequence-classification", "config": {"model_type": "bert"}}


def rows_of(count):
    return datasets.Dataset.from_dict(
        {
            "text": [
                f"some words about number {i} " * (1 + i % 9) for i in range(count)
            ],
            "label": [("even", "odd")[i % 2] for i in range(count)],
        }
    )


def catalog_of(folder, model=MODEL, rows=rows_of, **tokenize):
    tokenize = {"max_length": 24, "vocab_size": 90, **tokenize}
    given = {
        f"{name}_rows": MemoryDataset(rows(n), copy_mode="assign")
        for name, n in zip(SPLITS, (80, 10, 10), strict=True)
    }
    settings = parse_settings({"model": model, "tokenize": tokenize})
    return text_catalog(folder, settings, **given)


def run(catalog):
    SequentialRunner().run(create_pipeline(), catalog)
    return catalog


def test_rows_become_tokens(tmp_path):
    catalog = run(catalog_of(tmp_path))
    tokens, rows = catalog["train_tokens"].load(), catalog["train_rows"].load()
    tokenizer = catalog["tokenizer"].load()
    assert (
        tokens["input_ids"][:]
        == tokenizer(rows["text"][:], truncation=True, max_length=24).input_ids
    )
    assert catalog["label_names"].load() == ["even", "odd"]
    assert tokens["labels"][:] == [0, 1] * 40
    assert catalog["token_report"].load()["splits"]["test"]["rows"] == 10
    assert len(catalog["token_figure"].load().data) == 1


def grown(count):
    return rows_of(count + 5)


MADE = [f"{name}_tokens" for name in SPLITS]
SHORTER = "train_tokens: made again (tokenize.max_length: 24 -> 12"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, [f"{name}: unchanged, kept" for name in ("tokenizer", *MADE)]),
        ({"max_length": 12}, ["tokenizer: unchanged, kept", SHORTER]),
        ({"rows": grown}, [f"{n}: made again (rows: " for n in ("tokenizer", *MADE)]),
    ],
)
def test_a_second_run_makes_again_what_a_change_reaches(tmp_path, caplog, change, said):
    caplog.set_level("DEBUG", "flatout")
    run(catalog_of(tmp_path))
    caplog.clear()
    run(catalog_of(tmp_path, **change))
    assert [text for text in said if text not in caplog.text] == []
    assert ("rows/s" in caplog.text) == bool(change)


@pytest.mark.parametrize("node", [train_model, run_trials, run_sweep])
def test_no_node_takes_tokens_of_another_tokenizer(tmp_path, node):
    """A run that ends between the tokenizer and the tokens leaves such a state."""
    catalog = run(catalog_of(tmp_path))
    other = catalog_of(tmp_path, rows=grown)
    SequentialRunner().run(create_pipeline().only_nodes("make_tokenizer"), other)
    tokens = {f"{name}_rows": catalog[f"{name}_tokens"].load() for name in SPLITS}
    settings = {"model": MODEL, "tokenize": {"max_length": 24, "vocab_size": 90}}
    made = {"tokenizer": other["tokenizer"].load(), "label_names": ["even", "odd"]}
    with pytest.raises(StaleTokensError) as error:
        node(**{**tokens, **settings, **made})
    assert str(error.value) == (
        "the token rows were created from other inputs (then -> now): tokenizer: its "
        "files have changed (train_tokens, validation_tokens, test_tokens). Run kedro "
        "run --pipelines=split,tokenize with the same --env and --params, or set the "
        "parameters back"
    )


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            ('"lowercase": true', '"lowercase": false'),
            "tokenizer: made again (files that are missing or changed",
        ),
        (
            ('"max_input_chars_per_word": 100', '"max_input_chars_per_word": 101'),
            "train_tokens: made again (tokenizer: ",
        ),
    ],
)
def test_an_edited_tokenizer_never_fits_old_tokens(tmp_path, caplog, edit, message):
    caplog.set_level("DEBUG", "flatout")
    run(catalog_of(tmp_path))
    file = tmp_path / "tokenizer" / "tokenizer.json"
    text = file.read_text()
    assert edit[0] in text
    file.write_text(text.replace(*edit))
    caplog.clear()
    run(catalog_of(tmp_path))
    assert message in caplog.text


def test_bad_lengths_stop_before_anything_is_written(tmp_path):
    model = {**MODEL, "config": {"model_type": "bert", "max_position_embeddings": 16}}
    with pytest.raises(
        ValueError, match="max_length is 24, but the model accepts at most 16"
    ):
        run(catalog_of(tmp_path, model=model))
    assert not (tmp_path / "train_tokens").exists()


def test_a_missing_checkpoint_keeps_the_text_of_its_error(tmp_path):
    model = {**MODEL, "name_or_path": str(tmp_path / "nowhere")}
    with pytest.raises(
        DatasetError, match=r"its tokenizer could not be loaded\. Looked for"
    ):
        run(catalog_of(tmp_path, model=model))


def test_a_tokenizer_that_is_not_there_says_what_to_run(tmp_path):
    for kind in (TokenizerFolder, TokenizerFile):
        with pytest.raises(DatasetError, match="kedro run --pipelines=tokenize"):
            kind(filepath=str(tmp_path)).load()
