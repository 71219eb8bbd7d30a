"""Pairs and triplets, from raw columns to token rows of several sequences."""

import json

import numpy as np
import pandas as pd
import pytest

from flatout.engine.data.raw_texts import RawTextsError
from flatout.engine.parameters import (
    ModelSettings,
    SettingsError,
    TokenizeSettings,
    parse_settings,
)
from flatout.engine.rows.rows import rows_from_dataset
from flatout.engine.tokenizing.token_recipes import tokens_recipe
from tests.engine.families import CONFIGS
from tests.make import saved_tokenizer, text_recipes

TASK = "embedding"
MODEL = ModelSettings(task=TASK, config={"model_type": "bert", **CONFIGS["bert"]})
LIMITS = TokenizeSettings(vocab_size=200, max_length=12)
PAIRS = {"anchor_column": "q", "positive_column": "a"}
TRIPLETS = {**PAIRS, "negative_column": "n"}
WORDS = "the quick brown fox jumps over the lazy dog".split()


def frame_of(count: int, **columns) -> pd.DataFrame:
    pairs = {
        "q": [" ".join(WORDS[: 1 + n % 9]) + f" {n}" for n in range(count)],
        "a": [" ".join(WORDS[n % 7 :]) + f" of {n}" for n in range(count)],
    }
    return pd.DataFrame({**pairs, **columns})


def split(frame: pd.DataFrame, task: str = TASK, **options):
    made = text_recipes(frame, task, max_rejected_fraction=1, **options)
    return made["train_rows"].to_dataset(), made["rejected_rows"].table().to_pylist()


@pytest.mark.parametrize("form", ["pairs", "texts", "lists", "json", "mixed"])
def test_each_text_is_a_sequence_of_its_own(tmp_path, form):
    frame = frame_of(60)
    own = [[f"wrong {n}", "lazy fox"][: 1 + n % 2] for n in range(60)]
    if form != "pairs":
        by = {"texts": lambda t: t[0], "lists": list, "json": json.dumps}
        by["mixed"] = lambda t: tuple(t) if len(t) > 1 else t[0]
        frame["n"] = [by[form](texts) for texts in own]
    rows, rejected = split(frame, **(PAIRS if form == "pairs" else TRIPLETS))
    assert not rejected
    file = saved_tokenizer(tmp_path, rows, MODEL, LIMITS)
    recipe = tokens_recipe("train_tokens", rows, file, [], MODEL, LIMITS)
    tokens = rows_from_dataset(recipe.to_dataset())
    members, numbers = tokens.sequences(np.arange(len(tokens)))
    found = iter(members.views(numbers))
    labels = iter(members.labels_of(numbers).tolist())
    by_text = {}
    file.backend.enable_truncation(12)
    for row, source in enumerate(rows["source_row"]):
        texts = [frame["q"][source], frame["a"][source]]
        negatives = {"pairs": [], "texts": own[source][:1]}
        texts += negatives.get(form, own[source])
        for place, text in enumerate(texts):
            ids = file.backend.encode(text).ids
            assert next(found).tolist() == ids
            sample, role, known = next(labels)
            assert (sample, role) == (row, place)
            assert by_text.setdefault(tuple(ids), known) == known
    assert len(set(by_text.values())) == len(by_text)
    assert next(found, None) is None
    facts = tokens.facts
    assert facts.longest == max(map(len, by_text)) <= 12
    assert facts.most_sequences == {"pairs": 2, "texts": 3}.get(form, 4)
    assert facts.num_tokens == int(members.lengths(numbers).sum())


BAD = {
    "q": {3: "", 4: None, 5: " "},
    "a": {6: "", 7: None},
    "n": {8: None, 9: "", 10: "of 10", 11: "[1, 2]", 12: '["good", ""]'},
}
REASONS = {
    3: "q is empty",
    4: "q is missing",
    5: "q is empty",
    6: "a is empty",
    7: "a is missing",
    8: "n is missing",
    9: "n is empty",
    10: "n equals the positive",
    11: "n is neither a text nor a list of texts",
    12: "n is empty",
}


def test_rows_that_are_no_pairs_are_rejected_with_a_reason():
    frame = frame_of(200, n=[f"wrong {n}" for n in range(200)])
    for column, values in BAD.items():
        for row, value in values.items():
            frame.loc[row, column] = value
    frame.loc[10, "n"] = frame["a"][10]
    rows, rejected = split(frame, **TRIPLETS)
    assert {one["row"]: one["reason"] for one in rejected} == REASONS
    assert not REASONS.keys() & set(rows["source_row"])


def test_scores_outside_of_the_range_are_rejected(tmp_path):
    scores = np.linspace(-1, 1, 100)
    frame = frame_of(100, s=scores)
    frame.loc[[3, 4, 5], "s"] = [4.5, -1.1, np.nan]
    rows, rejected = split(frame, **PAIRS, label_column="s")
    found = {one["row"]: (one["reason"], one["excerpt"]) for one in rejected}
    range_fault = "s is not between -1 and 1: divide all by the largest"
    assert (found[3], found[4]) == ((range_fault, "4.5"), (range_fault, "-1.1"))
    assert found.keys() == {3, 4, 5}
    file = saved_tokenizer(tmp_path, rows, MODEL, LIMITS)
    recipe = tokens_recipe("train_tokens", rows, file, [], MODEL, LIMITS)
    tokens = rows_from_dataset(recipe.to_dataset())
    members, numbers = tokens.sequences(np.arange(len(tokens)))
    sample, place, bits = members.labels_of(numbers).T
    known = bits.astype(np.int32).view(np.float32)
    expected = scores[rows["source_row"]]
    np.testing.assert_allclose(known, expected.repeat(2), rtol=1e-6)
    assert place.tolist() == [0, -1] * len(rows)
    assert sample.tolist() == np.arange(len(rows)).repeat(2).tolist()


def test_a_column_label_is_the_score_of_pairs_and_may_be_absent(caplog):
    caplog.set_level("INFO")
    rows, _ = split(frame_of(100, label=0.5), **PAIRS)
    assert "pairs have the score 'label' (split.label_column" in caplog.text
    assert set(rows["label"]) == {0.5}
    rows, _ = split(frame_of(100, label=0.5), **PAIRS, label_column=None)
    assert "label" not in rows.column_names
    with pytest.raises(
        RawTextsError, match=r"split\.label_column is 's', which is not"
    ):
        split(frame_of(10), **PAIRS, label_column="s")
    with pytest.raises(RawTextsError, match="triplets have no score: set it, or"):
        split(frame_of(10, n="x", label=0.5), **TRIPLETS)


def test_a_pair_is_a_repeat_only_with_all_its_texts():
    frame = frame_of(100)
    again = pd.concat([frame, frame[:10], frame[:10].assign(a="other")])
    made = text_recipes(again.reset_index(drop=True), TASK, **PAIRS)
    assert made["split_report"].value()["duplicates"] == 10
    columns = made["train_rows"].to_dataset().column_names
    assert columns == ["text", "passages", "source_row"]


def test_all_triplets_of_an_anchor_are_in_one_split():
    frame = pd.concat([frame_of(100, n=f"wrong {k}") for k in range(3)])
    made = text_recipes(frame.reset_index(drop=True), TASK, **TRIPLETS)
    anchors = [
        set(made[f"{name}_rows"].to_dataset()["text"])
        for name in ("train", "validation", "test")
    ]
    assert sum(map(len, anchors)) == len(set.union(*anchors)) == 100


def test_columns_that_are_missing_are_named():
    with pytest.raises(RawTextsError, match=r"set split\.anchor_column"):
        split(frame_of(10))
    with pytest.raises(RawTextsError, match=r"split\.negative_column is 'm'"):
        split(frame_of(10, n="x"), **{**TRIPLETS, "negative_column": "m"})
    with pytest.raises(RawTextsError, match=r"split\.text_pair_column cannot be used"):
        split(frame_of(10, n="x"), **PAIRS, text_pair_column="n")
    with pytest.raises(SettingsError, match=r"for model\.task: embedding"):
        split(frame_of(10), task="masked-lm", **PAIRS)


@pytest.mark.parametrize("columns", [{"anchor_column": "q"}, {"negative_column": "n"}])
def test_columns_of_pairs_go_together(columns):
    model = {"config": {"model_type": "bert"}}
    with pytest.raises(SettingsError, match="anchor_column and positive_column"):
        parse_settings({"split": columns, "model": model})
