"""Detection with the top g keys compared with a search over all keys, and metrics
compared with scikit-learn."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support
from transformers import AutoTokenizer

from flatout.engine.models.building import ModelError, build
from flatout.engine.parameters import ModelSettings, TokenizeSettings
from flatout.engine.predict.detection import detect
from flatout.engine.rows.vocabulary import Vocabulary
from flatout.engine.tasks import make_task
from flatout.engine.tokenizing.tokenizer import TokenizerError, TokenizerRecipe
from tests.make import exact_settings, saved_tokenizer

SIZES = {"model_type": "log_key_lstm", "hidden_size": 8}
SESSIONS = [
    ("s0", "open read read close", "normal"),
    ("s1", "open close", "normal"),
    ("s2", "open never-seen close", "abnormal"),
    ("s3", "close", "abnormal"),
    ("s4", "read open close open read write", "abnormal"),
    ("s5", "", "normal"),
    ("s6", "write write", None),
]


def table_of(rows):
    columns = zip(*rows, strict=True)
    names = ("session", "text", "label")
    return pa.table(
        {n: pa.array(c, pa.string()) for n, c in zip(names, columns, strict=True)}
    )


def saved(folder, texts, task="next-key", **sizes):
    """Save a tokenizer for `texts` and an untrained model."""
    model = ModelSettings(task=task, config=SIZES | sizes)
    rows = Dataset(pa.table({"text": texts}))
    file = saved_tokenizer(folder, rows, model, TokenizeSettings())
    vocabulary = Vocabulary.of(AutoTokenizer.from_pretrained(folder))
    made = make_task(model, (), vocabulary)
    torch.manual_seed(3)
    return build(model, made, vocabulary, 32).eval(), file


def settings_of(top_keys, **detect_options):
    return exact_settings(
        split={"group_column": "session", "label_column": None},
        model={"task": "next-key", "config": SIZES},
        tokenize={"max_length": 32},
        predict={"window_rows": 3},
        detect={"top_keys": top_keys, **detect_options},
    )


TRAIN = ["open read close", "open write close", "open read read close"]


@torch.no_grad()
def worst(model, tokenizer, text):
    """Return the rank and place of the least expected key, computed key by key, and the
    probability of the end."""
    ids = tokenizer.backend.encode(text).ids
    unknown = tokenizer.token_id("unk_token")
    no_keys = range(5)  # pad, unknown, start, end, mask
    ranks = []
    for at in range(1, len(ids)):
        scores = model(torch.tensor([ids[:at]])).logits[0, -1]
        order = [
            n for n in scores.argsort(descending=True).tolist() if n not in no_keys
        ]
        if at < len(ids) - 1:
            unseen = ids[at] == unknown
            ranks.append(len(scores) if unseen else order.index(ids[at]))
    return max(ranks), 1 + ranks.index(max(ranks)), scores.softmax(0)[ids[-1]].item()


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("top_keys", [1, 5, 7])
def test_a_session_is_abnormal_by_its_least_expected_key(tmp_path, top_keys, window):
    model, tokenizer = saved(tmp_path, TRAIN, window_keys=window)
    ends = [worst(model, tokenizer, text)[2] for _, text, _ in SESSIONS if text]
    limit = sorted(ends)[2]  # two of the sessions are below it
    settings = settings_of(top_keys, min_end_probability=limit)
    table, report = detect(model, tokenizer, table_of(SESSIONS), settings)
    rows = table.to_dict("records")
    assert [row["session"] for row in rows] == [name for name, *_ in SESSIONS]
    good = [
        (row, text) for row, (_, text, _) in zip(rows, SESSIONS, strict=True) if text
    ]
    for row, text in good:
        rank, place, end = worst(model, tokenizer, text)
        assert row["rank"] == rank
        assert row["end_probability"] == pytest.approx(end, rel=1e-4)
        assert row["breaks_off"] == (end < limit)
        assert row["abnormal"] == (rank >= top_keys or end < limit)
        expected = (*text.split(), "the end")
        by_the_end = end < limit and rank < top_keys
        assert row["place"] == (len(expected) if by_the_end else place)
        assert row["key"] == expected[int(row["place"]) - 1]
    assert {row["breaks_off"] for row, _ in good} == {True, False}
    whole = table[["rank", "place", "abnormal", "breaks_off"]].dtypes.astype(str)
    assert whole.tolist() == ["Int64", "Int64", "boolean", "boolean"]
    assert pd.isna(rows[5]["abnormal"]) and rows[5]["reason"] == "text is empty"
    assert rows[2]["abnormal"] and rows[2]["key"] == "never-seen"
    known = [row for row, _ in good if pd.notna(row["label"])]
    truth = [row["label"] == "abnormal" for row in known]
    guess = [row["abnormal"] for row in known]
    expected = precision_recall_fscore_support(
        truth, guess, average="binary", zero_division=np.nan
    )
    for name, figure in zip(("precision", "recall", "f1"), expected, strict=False):
        assert report[name] == pytest.approx(figure)
    assert report["unusable"] == 1 and report["without_label"] == 1
    assert report["sessions"] == len(good)
    at = report["by_top_keys"][top_keys - 1]
    assert at.items() <= report.items()


def test_the_first_key_that_is_none_of_the_likeliest_is_abnormal(tmp_path):
    """The g likeliest keys have the ranks 0 to g - 1, so rank g is the first alarm."""
    model, tokenizer = saved(tmp_path, TRAIN)
    known = [one for one in SESSIONS if one[1] and one[2]]
    ranks = [worst(model, tokenizer, text)[0] for _, text, _ in known]
    truth = [label == "abnormal" for *_, label in known]
    for limit in sorted({rank for rank in ranks if rank}):
        guess = [rank >= limit for rank in ranks]
        settings = settings_of(limit, min_end_probability=0.0)
        table, report = detect(model, tokenizer, table_of(known), settings)
        assert table["abnormal"].tolist() == guess
        ((silent, false), (missed, true)) = confusion_matrix(truth, guess).tolist()
        for figures in (report, report["by_top_keys"][limit - 1]):
            assert figures["true_alarms"] == true
            assert figures["false_alarms"] == false
            assert figures["missed"] == missed
            assert figures["rightly_silent"] == silent


def test_a_session_that_just_fits_is_not_cut_and_what_is_does_not_break_off(tmp_path):
    """The length includes the start and end tokens that transformers adds."""
    model, tokenizer = saved(tmp_path, TRAIN)
    texts = [" ".join(["open"] * count) for count in (29, 30, 31)]
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    cut = [len(theirs(text)["input_ids"]) > 32 for text in texts]
    assert cut == [False, False, True]
    rows = [(f"s{n}", text, "normal") for n, text in enumerate(texts)]
    settings = settings_of(30, min_end_probability=0.999)
    table, report = detect(model, tokenizer, table_of(rows), settings)
    assert (report["cut_sessions"], report["breaks_off"]) == (1, 2)
    broken = table["breaks_off"].tolist()
    assert broken == [not long for long in cut]


def test_without_labels_there_are_alarms_and_no_figures(tmp_path):
    model, tokenizer = saved(tmp_path, TRAIN)
    sessions = table_of(SESSIONS).drop_columns(["label"])
    _, report = detect(model, tokenizer, sessions, settings_of(1, label_column=None))
    assert report["abnormal_found"] > 0 and report["f1"] is None
    with pytest.raises(ValueError, match=r"set detect\.label_column"):
        detect(model, tokenizer, sessions, settings_of(1))


def test_a_model_of_another_task_is_refused(tmp_path):
    model, tokenizer = saved(tmp_path, TRAIN)
    model.config.flatout_task = "causal-lm"
    with pytest.raises(ModelError):
        detect(model, tokenizer, table_of(SESSIONS), settings_of(1))


def test_keys_are_whole_words_and_the_commonest_stay(tmp_path, caplog):
    _, tokenizer = saved(tmp_path, ["Blk_1 b-2  Blk_1", "µ Blk_1"])
    ids = tokenizer.backend.encode("Blk_1 b-2 µ blk_1").ids
    pieces = [tokenizer.backend.id_to_token(number) for number in ids]
    assert pieces == ["[CLS]", "Blk_1", "b-2", "µ", "[UNK]", "[SEP]"]
    assert tokenizer.backend.token_to_id("Blk_1") == 5
    many = Dataset(pa.table({"text": [" ".join(f"k{n}" for n in range(80)) + " k7"]}))
    model = ModelSettings(task="next-key", config=SIZES)
    few = TokenizeSettings(vocab_size=64)
    built = TokenizerRecipe(many, model, few).build()
    assert len(built) == 64 and "k7" in built.get_vocab()
    assert "21 of 80 keys are unknown" in caplog.text


def test_one_key_is_nothing_to_predict(tmp_path):
    with pytest.raises(TokenizerError, match="only one key, 'E1'"):
        saved(tmp_path, ["E1 E1", "E1"])
