"""Predictions of a saved model for texts, compared with plain transformers."""

import json
import random

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, pipeline

from flatout.engine.batches.collation import Collator
from flatout.engine.data.raw_texts import RawTextsError
from flatout.engine.data.readers.text_files import TextFiles
from flatout.engine.models.building import ModelError, load_pretrained
from flatout.engine.parameters import (
    ModelSettings,
    SettingsError,
    TokenizeSettings,
    parse_settings,
)
from flatout.engine.predict.predicting import predict
from flatout.engine.predict.predictor import Predictor, prefetched
from flatout.engine.predict.split_predictions import SplitPredictions
from flatout.engine.tokenizing.tokenizer import TokenizerFile
from tests.engine.families import CONFIGS, LABEL_NAMES
from tests.engine.remote_code import write_model
from tests.make import exact_settings, save_random, saved_tokenizer

MAX_LENGTH = 24
WORDS = "stock price falls after weak report while team wins a late match".split()


def texts(count: int) -> list[str]:
    chance = random.Random(5)
    return [
        " ".join(chance.choices(WORDS, k=chance.randint(1, 30))) for _ in range(count)
    ]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    rows = Dataset.from_dict({"text": texts(50)})
    bert = ModelSettings(config={"model_type": "bert"})
    saved_tokenizer(folder, rows, bert, TokenizeSettings(vocab_size=100))
    return folder


@pytest.fixture(scope="module")
def saved(tokenizer_folder, tmp_path_factory):
    """Return the folder of a saved model of a family and a task, which is created
    once."""
    made = {}

    def folder_of(family: str = "bert", task: str = "sequence-classification"):
        if (family, task) not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{task}")
            config = {"model_type": family, **CONFIGS[family]}
            settings = ModelSettings(task=task, config=config)
            names = LABEL_NAMES if task.endswith("classification") else []
            made[family, task] = save_random(folder, tokenizer_folder, settings, names)
        return made[family, task]

    return folder_of


def recipe(folder, rows, precision="fp32", split=(), model=None, **options):
    settings = parse_settings(
        {
            "runtime": {"precision": precision, "tf32": False, "threads": 1},
            "tokenize": {"max_length": MAX_LENGTH},
            "split": dict(split),
            "predict": options,
        }
    )
    model = model or load_pretrained(folder)
    return predict(model, TokenizerFile(folder), rows, settings)


def predicted(folder, rows, **options) -> pd.DataFrame:
    made = recipe(folder, rows, **options)
    return pa.Table.from_batches(made.batches(), made.schema).to_pandas()


def plain_logits(folder, *columns: list[str]) -> np.ndarray:
    """Return the logits of transformers alone, row by row."""
    model, tokenizer = (
        load_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    found = []
    with torch.no_grad():
        for row in zip(*columns, strict=True):
            inputs = tokenizer(
                *row, truncation=True, max_length=MAX_LENGTH, return_tensors="pt"
            )
            found.append(model(**inputs).logits[0].numpy())
    return np.stack(found)


@pytest.mark.parametrize("strategy", ["grouped", "packed"])
@pytest.mark.parametrize(
    "family", ["bert", "roberta", "modernbert", "modernbert-mean", "qwen3"]
)
def test_predictions_are_those_of_plain_transformers(saved, family, strategy):
    folder, rows = saved(family), texts(40)
    frame = predicted(
        folder, pd.DataFrame({"text": rows}), strategy=strategy, token_budget=64
    )
    logits = torch.from_numpy(plain_logits(folder, rows))
    expected = logits.softmax(-1).numpy()
    found = frame[[f"probability_{name}" for name in LABEL_NAMES]].to_numpy()
    assert np.abs(found - expected).max() < 1e-5
    best = expected.argmax(1)
    assert expected.std(0).max() > 0.01  # 1,000 times the tolerance
    assert frame["label"].tolist() == [LABEL_NAMES[index] for index in best]
    assert frame["score"].tolist() == found.max(1).tolist()
    assert frame["row"].tolist() == list(range(40))
    assert frame["reason"].isna().all()


def test_a_model_of_its_own_code_predicts(tokenizer_folder, tmp_path):
    folder, rows = write_model(tmp_path / "own"), texts(20)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.save_pretrained(folder)
    model = load_pretrained(folder, trust_remote_code=True).eval()
    cut = {"truncation": True, "max_length": MAX_LENGTH, "return_tensors": "pt"}
    inputs = [tokenizer(text, **cut) for text in rows]
    with torch.no_grad():
        logits = [model(i.input_ids, i.attention_mask).logits for i in inputs]
    frame = predicted(folder, pd.DataFrame({"text": rows}), model=model)
    expected = torch.cat(logits).softmax(-1).max(-1)
    assert frame["score"].to_numpy() == pytest.approx(expected.values.numpy(), abs=1e-5)
    assert frame["label"].tolist() == [f"LABEL_{i}" for i in expected.indices.tolist()]


@pytest.mark.parametrize(("strategy", "multiple"), [("grouped", 8), ("packed", 64)])
def test_in_bf16_lengths_and_totals_are_rounded_up(
    saved, monkeypatch, strategy, multiple
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lengths, collate = [], Collator.collate

    def watched(*arguments, **named):
        batch = collate(*arguments, **named)
        lengths.append(batch["input_ids"].shape[1])
        return batch

    monkeypatch.setattr(Collator, "collate", watched)
    asked = {"strategy": strategy, "token_budget": 200}
    folder, rows = saved(), pd.DataFrame({"text": texts(40)})
    exact = predicted(folder, rows, **asked)
    assert any(length % multiple for length in lengths)
    lengths.clear()
    rounded = predicted(folder, rows, precision="bf16", **asked)
    assert lengths and not any(length % multiple for length in lengths)
    assert 0 < np.abs(rounded["score"] - exact["score"]).max() < 0.1


@pytest.mark.parametrize(
    ("split", "columns", "taken"),
    [
        ({"text_column": "review"}, ["review", "text"], "'review' (split.text_column)"),
        ({"text_column": "review"}, ["note", "text"], "'text' (as split writes it)"),
        ({}, ["review", "text"], "'text' (split.text_column)"),
    ],
)
def test_the_column_of_training_is_taken(saved, caplog, split, columns, taken):
    caplog.set_level("INFO")
    rows = pd.DataFrame({columns[0]: texts(8)[::-1], columns[1]: texts(8)})
    frame = predicted(saved(), rows, split=split)
    column = taken.split("'")[1]
    assert f"predict_texts: column {taken}" in caplog.messages
    assert frame["text"].tolist() == rows[column].tolist()
    expected = predicted(saved(), pd.DataFrame({"text": rows[column]}))
    assert frame["score"].tolist() == expected["score"].tolist()
    without = predicted(saved(), rows, split=split, keep_text=False)
    assert without.equals(frame.drop(columns="text"))


def test_windows_do_not_change_predictions(saved):
    rows = pd.DataFrame({"text": texts(40)})
    whole = predicted(saved(), rows)
    made = recipe(saved(), rows, window_rows=7)
    batches = list(made.batches())
    assert [batch.num_rows for batch in batches] == [7, 7, 7, 7, 7, 5]
    parts = pa.Table.from_batches(batches).to_pandas()
    assert parts["row"].tolist() == whole["row"].tolist()
    assert parts["label"].tolist() == whole["label"].tolist()
    assert np.abs(parts["score"] - whole["score"]).max() < 1e-5


@pytest.mark.parametrize("count", [2, 3, 9])
def test_the_shards_in_order_are_the_whole_bit_for_bit(saved, count):
    """With 9 shards, some of the 6 windows' shards are empty."""
    rows = pd.DataFrame({"text": [*texts(39), None]})
    whole = predicted(saved(), rows, window_rows=7)
    parts = [
        predicted(saved(), rows, window_rows=7, shard=f"{number}/{count}")
        for number in range(1, count + 1)
    ]
    assert max(len(part) for part in parts) < len(whole)
    found = pd.concat([part for part in parts if len(part)], ignore_index=True)
    pd.testing.assert_frame_equal(found, whole, check_exact=True)


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "1/0", "a/b", "1/2/3"])
def test_a_shard_that_does_not_exist_is_refused(shard):
    with pytest.raises(SettingsError, match=r"predict\.shard"):
        parse_settings({"predict": {"shard": shard}})


def test_devices_share_the_micro_batches_and_change_nothing(saved, monkeypatch):
    """Two copies of the model on one CPU simulate two GPUs."""
    rows = pd.DataFrame({"text": texts(40)})
    whole = predicted(saved(), rows, token_budget=64)
    devices = [torch.device("cpu"), torch.device("cpu", 0)]
    monkeypatch.setattr(Predictor, "_all_devices", lambda _: devices)
    made = recipe(saved(), rows, token_budget=64)
    found = pa.Table.from_batches(made.batches(), made.schema).to_pandas()
    pd.testing.assert_frame_equal(found, whole, check_exact=True)
    one, other = (made.predictor._models[device] for device in devices)
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(a is not b and a.equal(b) for a, b in pairs)


def test_a_regression_gives_values(saved):
    folder, rows = saved("bert", "regression"), texts(12)
    frame = predicted(folder, Dataset.from_dict({"text": rows}))
    assert list(frame.columns) == ["source", "row", "text", "value", "reason"]
    assert np.abs(frame["value"] - plain_logits(folder, rows)[:, 0]).max() < 1e-5
    ask = pipeline("text-classification", str(folder))  # as MLflow's pyfunc does
    scores = [row["score"] for row in ask(rows, truncation=True, max_length=MAX_LENGTH)]
    assert frame["value"].abs().max() > 1  # no probability
    assert np.abs(frame["value"] - scores).max() < 1e-5


def test_pairs_of_texts_are_told_apart_under_the_names_that_split_writes(saved):
    rows = pd.DataFrame({"text": texts(12), "text_pair": texts(12)[::-1]})
    columns = {"text_column": "question", "text_pair_column": "passage"}
    found = predicted(saved(), rows, split=columns)
    logits = torch.from_numpy(plain_logits(saved(), rows["text"], rows["text_pair"]))
    expected = logits.softmax(-1).max(-1).values.numpy()
    assert np.abs(found["score"] - expected).max() < 1e-5
    assert found["text_pair"].tolist() == rows["text_pair"].tolist()


def test_rows_that_cannot_be_used_stay_in_place(saved):
    values = ["weak report", None, "  ", 7, ["a"], "late match"]
    frame = predicted(
        saved(), pd.DataFrame({"t": values, "key": [10, 11, 12, 13, 14, 15]}),
        text_column="t", id_column="key",
    )  # fmt: skip
    assert frame["row"].tolist() == [0, 1, 2, 3, 4, 5]
    assert frame["id"].tolist() == ["10", "11", "12", "13", "14", "15"]
    assert frame["reason"].tolist()[1:5] == [
        "t is missing",
        "t is empty",
        "t is a number, not text",
        "t is not text",
    ]
    assert frame["reason"].isna().tolist() == [True, *[False] * 4, True]
    for column in ("label", "score", "probability_a"):
        assert frame[column].isna().tolist() == [False, *[True] * 4, False], column
    alone = predicted(saved(), pd.DataFrame({"text": ["weak report", "late match"]}))
    assert frame["label"].dropna().tolist() == alone["label"].tolist()


def test_a_file_without_one_usable_row_has_a_reason_a_row(saved):
    frame = predicted(saved(), pd.DataFrame({"text": [None, ""]}))
    assert frame["reason"].tolist() == ["text is missing", "text is empty"]
    assert frame["label"].isna().all()
    assert predicted(saved(), pd.DataFrame({"text": []}, dtype=object)).empty


def test_lines_of_a_file_that_cannot_be_cut_stay_in_place(saved, tmp_path):
    lines = [f"{index},{text}" for index, text in enumerate(texts(30))]
    lines[4], lines[29] = "4,weak,report", "29,weak,report"
    (tmp_path / "a.csv").write_text("\n".join(["id,text", *lines]) + "\n")
    frame = predicted(saved(), TextFiles(tmp_path / "a.csv"), window_rows=8)
    assert frame["row"].tolist() == list(range(30))
    assert frame["source"].unique().tolist() == ["a.csv"]
    told = frame["reason"].dropna()
    assert told.to_dict() == dict.fromkeys((4, 29), "3 fields instead of 2")


def test_an_empty_text_of_a_file_of_one_column_stays_in_place(saved, tmp_path):
    lines = [*texts(3), '""', "", *texts(3)]
    (tmp_path / "a.csv").write_text("\n".join(["text", *lines]) + "\n")
    frame = predicted(saved(), TextFiles(tmp_path / "a.csv"))
    assert frame["row"].tolist() == list(range(7))
    assert frame["reason"].dropna().to_dict() == {3: "text is empty"}


def test_shards_of_json_lines_are_one_after_another(saved, tmp_path):
    rows = texts(6)
    for name, part in (("a", rows[:3]), ("b", rows[3:])):
        lines = [json.dumps({"text": text}) for text in part]
        lines[1:] = "{", '{"text": 7}'
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    frame = predicted(saved(), TextFiles(tmp_path))
    assert frame["source"].tolist() == ["a.jsonl"] * 3 + ["b.jsonl"] * 3
    assert frame["row"].tolist() == [0, 1, 2, 0, 1, 2]
    assert frame["reason"].str.startswith("not valid JSON").tolist()[1::3] == [True] * 2
    assert frame["reason"].tolist()[2::3] == ["text is a number, not text"] * 2
    assert frame["label"].isna().tolist() == [False, True, True] * 2


def test_a_model_of_another_task_is_refused(saved):
    rows = pd.DataFrame({"text": texts(2)})
    with pytest.raises(ModelError, match="is a BertForMaskedLM; predict needs"):
        recipe(saved("bert", "masked-lm"), rows)
    model = load_pretrained(saved())
    model.config.problem_type = "multi_label_classification"
    del model.config.flatout_task  # like a checkpoint that was not created by flatout
    made = predict(model, TokenizerFile(saved()), rows, parse_settings({}))
    assert made.predictor.task.settings.task == "multi-label-classification"


def test_a_tokenizer_of_another_model_is_refused(saved):
    model = load_pretrained(saved())
    model.config.vocab_size = 50
    rows = pd.DataFrame({"text": texts(2)})
    with pytest.raises(ModelError, match="they do not belong together"):
        predict(model, TokenizerFile(saved()), rows, parse_settings({}))


def test_a_missing_column_is_answered_with_the_nearest(saved):
    rows = pd.DataFrame({"review_text": texts(2), "stars": [1, 2]})
    with pytest.raises(RawTextsError) as caught:
        recipe(saved(), rows, text_column="reviewtext", id_column="star")
    assert str(caught.value) == (
        "predict_texts has the columns 'review_text', 'stars'. predict.text_column is "
        "'reviewtext', which is not there (did you mean 'review_text'?). "
        "predict.id_column is 'star', which is not there (did you mean 'stars'?). "
        "Set the names in conf/local/parameters.yml"
    )


def test_lengths_that_do_not_fit_are_refused(saved):
    rows = pd.DataFrame({"text": texts(2)})
    with pytest.raises(SettingsError, match="set it to at most 512, or to auto"):
        recipe(saved(), rows, max_length=513)
    with pytest.raises(SettingsError, match="set it to at least 24, or lower"):
        recipe(saved(), rows, token_budget=23)


def test_made_ahead_keeps_order_and_errors():
    def items():
        yield from range(3)
        raise KeyError("end")

    found = []
    with pytest.raises(KeyError, match="end"):
        for item in prefetched(items()):
            found.append(item)
    assert found == [0, 1, 2]


def test_a_split_is_judged_by_the_threshold_of_the_settings(saved):
    """For several labels per row, results have a separate key for each threshold."""
    folder = saved(task="multi-label-classification")
    plain = plain_logits(folder, texts(12))
    tokens = AutoTokenizer.from_pretrained(folder)(
        texts(12), truncation=True, max_length=MAX_LENGTH
    )["input_ids"]
    labels = pa.array([[1.0, 0.0, 1.0]] * 12, pa.list_(pa.float32(), 3))
    ids = pa.array(tokens, pa.list_(pa.int32()))
    dataset = Dataset(pa.table({"input_ids": ids, "labels": labels}))
    model, tokenizer = load_pretrained(folder), TokenizerFile(folder)
    for threshold in (0.3, 0.7):
        options = {
            "task": "multi-label-classification",
            "name_or_path": str(folder),
            "label_threshold": threshold,
        }
        settings = exact_settings(model=options)
        found = SplitPredictions(
            model, tokenizer, dataset, dataset, LABEL_NAMES, settings
        )
        given = 1 / (1 + np.exp(-plain)) > threshold
        expected = [
            ", ".join(n for n, on in zip(LABEL_NAMES, row, strict=True) if on)
            for row in given
        ]
        assert found.table()["prediction"].to_pylist() == expected
