"""One tag per word: rows, alignment, metrics and predictions."""

import json
import random

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from transformers import AutoTokenizer

from flatout.engine.data.raw_texts import open_raw_texts
from flatout.engine.data.rows import check_batch
from flatout.engine.models.building import Vocabulary, build, load_pretrained
from flatout.engine.parameters import ModelSettings, SplitSettings, TokenizeSettings
from flatout.engine.predict.predicting import predict
from flatout.engine.rows.rows import rows_from_dataset
from flatout.engine.tasks import columns_of, make_task
from flatout.engine.tokenizing.encoders.encode import TokensError
from flatout.engine.tokenizing.token_recipes import label_names_of, tokens_recipe
from flatout.engine.tokenizing.tokenizer import TokenizerFile
from flatout.reports.summary import summary_lines
from tests.engine.families import CONFIGS
from tests.make import exact_settings, saved_tokenizer, text_recipes

TASK = "token-classification"
TAGS = ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]
WORDS = "Ada Lovelace went to London-Bridge , unbelievably she sang a1b2".split()
LIMITS = TokenizeSettings(vocab_size=90, max_length=16)


def rows_of(count: int) -> pd.DataFrame:
    chance = random.Random(3)
    words = [chance.choices(WORDS, k=chance.randint(1, 20)) for _ in range(count)]
    tags = [chance.choices(TAGS, k=len(row)) for row in words]
    return pd.DataFrame({"text": words, "label": tags})


def checked(frame: pd.DataFrame):
    (batch,) = open_raw_texts(frame).batches(["text", "label"])
    found = check_batch(batch, columns_of(SplitSettings(), TASK))
    reasons = {r["row"]: r["reason"] for r in found.rejected.to_pylist()}
    return found.table.to_pylist(), reasons


def test_lists_and_json_become_words_with_tags():
    frame = pd.DataFrame({"text": ['["a", "b"]'], "label": ['["O", "B-LOC"]']})
    rows, reasons = checked(frame)
    assert not reasons
    assert (rows[0]["text"], rows[0]["label"]) == ("a b", ["O", "B-LOC"])
    lists, reasons = checked(
        pd.DataFrame({"text": [["a", "b"]], "label": [["O", "X"]]})
    )
    assert (lists[0]["text"], lists[0]["label"], reasons) == ("a b", ["O", "X"], {})


BAD = {
    "label has a different length than text": (["a", "b"], ["O"]),
    "text is empty": ([], []),
    "text is missing": (None, ["O"]),
    "label is missing": (["a"], None),
    "text has a word that is empty or contains white space": (["a b"], ["O"]),
    "label is not a list of tags": (["a"], [1.5]),
}


def test_what_cannot_be_used_goes_to_the_quarantine_with_its_reason():
    good = [(["a", "b"], ["O", "X"])]
    rows = [*BAD.values(), *good]
    frame = pd.DataFrame(
        {
            "text": [json.dumps(t) if isinstance(t, list) else t for t, _ in rows],
            "label": [json.dumps(g) if isinstance(g, list) else g for _, g in rows],
        }
    )
    kept, reasons = checked(frame)
    assert reasons == dict(enumerate(BAD))
    spans = [{"start": 0, "end": 3, "label": "PER"}]
    _, reasons = checked(pd.DataFrame({"text": ["Ada went"], "label": [spans]}))
    assert reasons == {0: "label is not a list of tags"}
    assert [row["text"] for row in kept] == ["a b"]


def not_utf8(texts):
    """Return a column of lists of texts, given as bytes."""
    flat = pa.array([word for row in texts for word in row], pa.binary())
    joined = pa.StringArray.from_buffers(len(flat), *flat.buffers()[1:])
    offsets = np.cumsum([0, *map(len, texts)]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, joined)


@pytest.mark.parametrize("column", ["text", "label"])
def test_a_value_that_is_not_utf8_rejects_its_row_alone(column):
    rows = [[b"a", b"b"], [b"c", b"\xe9"], [b"d"]]
    plain = [[str(word, "latin-1") for word in row] for row in rows]
    table = pa.table({"text": plain, "label": plain} | {column: not_utf8(rows)})
    found, reasons = checked(table)
    assert [row["text"] for row in found] == ["a b", "d"]
    assert reasons == {1: f"{column} is not valid UTF-8"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tokenizer's folder, and the rows of a split."""
    folder = tmp_path_factory.mktemp("tokenizer")
    rows = text_recipes(rows_of(300), TASK)["train_rows"].to_dataset()
    saved_tokenizer(folder, rows, model_of("bert"), LIMITS)
    return folder, rows


def tokens_of(folder, rows):
    file = TokenizerFile(folder)
    recipe = tokens_recipe("train", rows, file, TAGS, model_of("bert"), LIMITS)
    return recipe.to_dataset()


def model_of(family: str) -> ModelSettings:
    return ModelSettings(task=TASK, config={"model_type": family, **CONFIGS[family]})


def test_the_first_piece_of_a_word_is_its_target_as_in_transformers(made):
    folder, rows = made
    assert label_names_of(rows) == TAGS
    tokens = tokens_of(folder, rows)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row, token_row in zip(rows, tokens, strict=True):
        words = row["text"].split(" ")
        found = tokenizer(
            words, is_split_into_words=True, truncation=True, max_length=16
        )
        ids = found.word_ids()
        firsts = [w is not None and w not in ids[:n] for n, w in enumerate(ids)]
        labels = [
            TAGS.index(row["label"][w]) if first else -100
            for w, first in zip(ids, firsts, strict=True)
        ]
        assert token_row["input_ids"] == found["input_ids"]
        assert token_row["labels"] == labels
    assert sum(len(row["input_ids"]) == 16 for row in tokens) > 10


@pytest.mark.parametrize("tags", [["O"] * 21, [], None])
def test_rows_that_were_split_for_another_task_are_refused(made, tags):
    folder, rows = made
    odd = rows.map(
        lambda row, n: {"label": tags if n == 3 else row["label"]}, with_indices=True
    )
    words, count = len(rows[3]["text"].split(" ")), len(tags or [])
    with pytest.raises(TokensError, match=f"row 3 has {words} words and {count} tags"):
        tokens_of(folder, odd)


@pytest.mark.parametrize("strategy", ["grouped", "packed"])
@pytest.mark.parametrize("family", ["bert", "modernbert", "gpt2"])
def test_predictions_are_those_of_plain_transformers(made, family, strategy, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(made[0])
    torch.manual_seed(0)
    settings = model_of(family)
    task = make_task(settings, TAGS)
    model = build(settings, task, Vocabulary.of(tokenizer), 16, "sdpa").eval()
    for weight in model.parameters():
        weight.data *= 5 if weight.dim() > 1 else 1
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    frame = rows_of(30)
    chosen = exact_settings(
        tokenize={"max_length": 16},
        predict={"strategy": strategy, "token_budget": 64},
    )
    made_of = predict(load_pretrained(tmp_path), TokenizerFile(tmp_path), frame, chosen)
    table = pa.Table.from_batches(made_of.batches(), made_of.schema).to_pylist()
    kinds = set()
    for words, row in zip(frame["text"], table, strict=True):
        inputs = tokenizer(
            words,
            is_split_into_words=True,
            truncation=True,
            max_length=16,
            return_tensors="pt",
        )
        with torch.no_grad():
            shares = model(**inputs).logits[0].softmax(-1)
        ids = inputs.word_ids()
        expected = [
            TAGS[shares[ids.index(w)].argmax()] if w in ids else None
            for w in range(len(words))
        ]
        assert row["tags"] == expected
        kinds |= set(expected)
        scores = [
            shares[ids.index(w)].max().item() for w in range(len(words)) if w in ids
        ]
        assert row["scores"][: len(scores)] == pytest.approx(scores, abs=1e-5)
    assert len(kinds - {None}) > 1


def entities(names: list[str], rows: list[tuple[list[str], list[str]]]) -> dict:
    """Return metrics of (true, predicted) tags, in a batch of rows and one of
    padding."""
    task = make_task(model_of("bert"), names)
    metrics = task.metrics(torch.device("cpu"))
    true = [[names.index(t), n == 0] for row, _ in rows for n, t in enumerate(row)]
    given = torch.tensor([names.index(t) for _, row in rows for t in row])
    padding = torch.full((3, 2), -100)
    logits = torch.nn.functional.one_hot(
        torch.cat([given, given[:1].expand(3)]), len(names)
    )
    metrics.update(logits.float(), torch.cat([torch.tensor(true).long(), padding]))
    return metrics.compute()


def test_entities_of_rows_by_hand():
    rows = [
        (["B-PER", "I-PER", "O", "B-LOC"], ["B-PER", "I-PER", "O", "B-PER"]),
        (["I-PER", "O", "B-LOC", "I-LOC"], ["I-PER", "O", "B-LOC", "O"]),
        (["I-LOC", "B-LOC", "O", "O"], ["I-LOC", "B-LOC", "O", "O"]),
    ]
    # 4 of 6 entities are found in 6. PER: 2 of 2 in 3, LOC: 2 of 4 in 3.
    found = entities(TAGS, rows)
    assert found == pytest.approx(
        {
            "accuracy": 10 / 12,
            "precision": 4 / 6,
            "recall": 4 / 6,
            "f1": 4 / 6,
            "f1_macro": (4 / 5 + 4 / 7) / 2,
        }
    )
    shown = summary_lines(None, {"split": "test", "loss": 0.5, **found}, {})
    assert "f1 0.6667" in shown[0]


def test_tags_that_mark_no_entities_have_an_accuracy_alone():
    rows = [(["NOUN", "VERB"], ["NOUN", "NOUN"])]
    assert entities(["NOUN", "VERB"], rows) == {"accuracy": 0.5}


SPANS = ("precision", "recall", "f1", "f1_macro")
SEQEVAL = {
    "accuracy": 0.7135678391959799,
    "precision": 0.746675110829639,
    "recall": 0.7424433249370277,
    "f1": 0.7445532049257974,
    "f1_macro": 0.7443196647710266,
}


def test_entities_are_seqevals():
    """Compare with the example in seqeval's README, and with the results of version
    1.2.2 on random rows. seqeval is not a dependency, because its last release was in
    2020."""
    miscellaneous = ["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"]
    earlier = ["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"]
    person = ["B-PER", "I-PER", "O"]
    tags = ["O", "B-MISC", "I-MISC", "B-PER", "I-PER"]
    found = entities(tags, [(miscellaneous, earlier), (person, person)])
    assert found == pytest.approx({"accuracy": 0.8} | dict.fromkeys(SPANS, 0.5))
    chance = random.Random(2)
    names = [f"{p}-{t}" for p in "BIES" for t in ("A", "B-C")] + ["O"]
    true = [[chance.choice(names) for _ in range(1 + n % 9)] for n in range(400)]
    given = [
        [t if chance.random() < 0.7 else chance.choice(names) for t in row]
        for row in true
    ]
    found = entities(names, list(zip(true, given, strict=True)))
    assert found == pytest.approx(SEQEVAL)


def test_entities_are_not_parted_by_pieces_that_are_no_targets():
    """Further pieces of words and padding may also be among the targets."""
    names = ["O", "B-A", "I-A"]
    metrics = make_task(model_of("bert"), names).metrics(torch.device("cpu"))
    true = [["B-A", None, "I-A", "O"], ["I-A", "I-A", None, "O"]]
    given = [["B-A", "O", "I-A", "O"], ["I-A", "O", "B-A", "O"]]
    labels = [
        [-100, -100] if tag is None else [names.index(tag), place == 0]
        for row in true
        for place, tag in enumerate(row)
    ]
    guess = torch.tensor([names.index(tag) for row in given for tag in row])
    logits = torch.nn.functional.one_hot(guess, 3).float()
    metrics.update(logits, torch.tensor(labels))
    expected = {"accuracy": 5 / 6} | dict.fromkeys(SPANS, 0.5)
    assert metrics.compute() == pytest.approx(expected)


def test_the_first_target_of_each_row_is_marked(made):
    """Therefore, no entity spans two rows."""
    tokens = rows_from_dataset(tokens_of(*made))
    task = make_task(model_of("bert"), TAGS)
    found = task.targets(tokens, np.arange(len(tokens)), 0, pools_last=False).labels
    assert {len(labels) for labels in found} > {1, 2}
    for labels in found:
        assert labels[:, 1].tolist() == [1, *[0] * (len(labels) - 1)]


def test_rows_of_tags_are_read_as_they_were_written(made):
    written = tokens_of(*made)
    tokens = rows_from_dataset(written)
    assert tokens.has_token_labels
    assert not tokens.facts.label_counts
    (view,) = tokens.views(np.array([3]), "labels")
    assert view.tolist() == written["labels"][3]
