"""Hard negatives: their ranks, the margin, and stored vectors."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from flatout.engine.data.raw_texts import RawTextsError
from flatout.engine.models.building import ModelError, load_pretrained
from flatout.engine.models.model_files import save_sentence_files
from flatout.engine.parameters import SettingsError
from flatout.engine.predict import mining, vectors
from flatout.engine.predict.predicting import predict
from flatout.engine.tokenizing.tokenizer import TokenizerFile
from tests.engine.families import CONFIGS
from tests.make import exact_settings, save_random, saved_tokenizer, text_recipes

MAX_LENGTH, TOP, NEGATIVES, MARGIN = 24, 12, 3, 0.02
ANIMALS = "cat dog horse cow bird fish snake frog bear wolf".split()
PAIRS = {"anchor_column": "q", "positive_column": "a", "label_column": None}


def settings_of(folder, task="embedding", **options):
    mine = {"top_k": TOP, "negatives": NEGATIVES, "margin": MARGIN, **options}
    return exact_settings(
        model={"task": task, "config": {"model_type": "bert", **CONFIGS["bert"]}},
        tokenize={"max_length": MAX_LENGTH, "vocab_size": 120},
        mine={"folder": str(folder / "vectors"), **mine},
    )


def frame_of(count=200, **columns):
    chance = np.random.default_rng(0)
    names = chance.choice(ANIMALS, (count, 3))
    anchors = [f"who saw the {one} {n}" for n, (one, _, _) in enumerate(names)]
    answers = [f"the {' and the '.join(own)} of {n}" for n, own in enumerate(names)]
    return pd.DataFrame({"q": anchors, "a": answers, **columns})


def splits_of(frame, task="embedding", **columns):
    made = text_recipes(frame, task, **(PAIRS | columns))
    names = ("train", "validation", "test")
    return {name: made[f"{name}_rows"].to_dataset() for name in names}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a model, its tokenizer, and the files for sentence-transformers."""
    folder = tmp_path_factory.mktemp("model")
    settings, rows = settings_of(folder), splits_of(frame_of())["train"]
    saved_tokenizer(folder, rows, settings.model, settings.tokenize)
    save_random(folder, folder, settings.model, factor=8)
    save_sentence_files(load_pretrained(folder).config, folder, MAX_LENGTH)
    return folder


def mined(saved, folder, splits, corpus=None, **options):
    corpus = splits["train"] if corpus is None else corpus
    model, file = load_pretrained(saved), TokenizerFile(saved)
    made = mining.mine(model, file, splits, corpus, settings_of(folder, **options))
    return pa.Table.from_batches(made.batches(), made.schema).to_pandas()


def plain_negatives(saved, folder, frame, margin=MARGIN, top=TOP):
    """Return the negatives by anchor, computed from all products in one matrix."""
    texts = pd.unique(pd.concat([frame["q"], frame["a"]]))
    model, file = load_pretrained(saved), TokenizerFile(saved)
    rows = pd.DataFrame({"text": texts})
    made = predict(model, file, rows, settings_of(folder)).batches()
    found = np.concatenate([np.stack(b.column("vector").to_pylist()) for b in made])
    known = dict(zip(texts, found, strict=True))
    corpus = pd.unique(frame["a"])
    block = np.stack([known[text] for text in corpus])
    negatives = {}
    for anchor, own in frame.groupby("q")["a"]:
        scores = dict(zip(corpus, block @ known[anchor], strict=True))
        limit = min(scores[text] for text in own) - margin
        rest = [text for text in corpus if text not in {*own, anchor}]
        first = sorted(rest, key=lambda text: -scores[text])[:top]
        negatives[anchor] = [t for t in first if scores[t] <= limit][:NEGATIVES]
    return negatives


def test_negatives_are_those_of_all_products(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(vectors, "TEXTS_A_FILE", 31)
    monkeypatch.setattr(mining, "ANCHORS_AT_ONCE", 17)
    monkeypatch.setattr(mining, "ROWS_AT_ONCE", 13)
    frame = frame_of()
    more = frame[:30].assign(a=frame["a"][100:130].to_numpy())  # a second positive
    frame = pd.concat([frame, more, pd.DataFrame({"q": ["a x"], "a": frame["q"][:1]})])
    splits = splits_of(frame.reset_index(drop=True))
    found = mined(saved, tmp_path, splits)
    train = found[found["split"] == "train"].reset_index(drop=True)
    assert train["anchor"].tolist() == splits["train"]["text"][:]
    positives = [own[0] for own in splits["train"]["passages"]]
    assert train["positive"].tolist() == positives
    pairs = pd.DataFrame({"q": train["anchor"], "a": positives})
    expected = plain_negatives(saved, tmp_path, pairs)
    assert {*map(len, expected.values())} == {0, 1, 2, 3}
    for anchor, own in zip(train["anchor"], train["negative"], strict=True):
        assert list(own) == expected[anchor]
    for name in ("validation", "test"):
        rest = found[found["split"] == name]
        assert rest["anchor"].tolist() == splits[name]["text"][:]
        assert not any(map(len, rest["negative"]))


def test_what_it_writes_is_split_as_before(saved, tmp_path):
    splits = splits_of(frame_of(n=[["x"]] * 200), negative_column="n")
    found = mined(saved, tmp_path, splits)
    assert [*map(list, found["negative"][found["split"] == "test"])] == [
        ["x"] for _ in splits["test"]
    ]
    columns = {"anchor_column": "anchor", "positive_column": "positive"}
    columns |= {"negative_column": "negative", "split_column": "split"}
    again = splits_of(found, **columns)
    for name, rows in splits.items():
        assert again[name]["text"][:] == rows["text"][:]


def test_vectors_are_made_once_for_a_model(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(vectors, "TEXTS_A_FILE", 64)
    splits, calls = splits_of(frame_of()), []
    save = vectors._save

    def noted(found, path):
        calls.append(len(found))
        if len(calls) == 3:
            raise KeyboardInterrupt
        save(found, path)

    monkeypatch.setattr(vectors, "_save", noted)
    with pytest.raises(KeyboardInterrupt):
        mined(saved, tmp_path, splits)
    assert calls == [64, 64, 64]
    first = mined(saved, tmp_path, splits)
    count = 2 * len(splits["train"])
    assert sum(calls) == count + 64  # two files already existed
    del calls[3:]
    again = mined(saved, tmp_path, splits, margin=0.0)
    assert len(calls) == 3 and not again.equals(first)
    changed = tmp_path / "changed"
    model = load_pretrained(saved)
    model.embeddings.LayerNorm.bias.data += 0.01
    model.save_pretrained(changed)
    AutoTokenizer.from_pretrained(saved).save_pretrained(changed)
    mined(changed, tmp_path, splits)
    assert sum(calls[3:]) == count
    assert len(list((tmp_path / "vectors").glob("*.npy"))) == -(-count // 64)


def test_another_corpus_is_ranked(saved, tmp_path):
    splits = splits_of(frame_of())
    corpus = pd.DataFrame({"p": [*(f"the {a} of none" for a in ANIMALS * 2), "", None]})
    options = {"top_k": 10, "text_column": "p", "margin": 0.0}
    found = mined(saved, tmp_path, splits, corpus, **options)
    assert {text for own in found["negative"] for text in own} <= {*corpus["p"]}
    with pytest.raises(
        RawTextsError, match=r"mine\.text_column is 'text', which is not"
    ):
        mined(saved, tmp_path, splits, corpus)
    with pytest.raises(
        SettingsError, match=r"top_k=11, and mine_corpus has 10 distinct"
    ):
        mined(saved, tmp_path, splits, corpus, **options | {"top_k": 11})


def test_what_cannot_be_mined_is_refused(saved, tmp_path):
    splits = splits_of(frame_of())
    with pytest.raises(SettingsError, match=r"score above its positive less 2: raise"):
        mined(saved, tmp_path, splits, margin=2.0)
    scored = splits_of(frame_of(s=0.5), label_column="s")
    texts = splits_of(
        frame_of(),
        "masked-lm",
        text_column="q",
        anchor_column=None,
        positive_column=None,
    )
    for others in (scored, texts):
        with pytest.raises(SettingsError, match="train_rows has no pairs of an anchor"):
            mined(saved, tmp_path, others)
    with pytest.raises(SettingsError, match="top_k must be at least negatives, 20"):
        settings_of(tmp_path, negatives=20)
    model = load_pretrained(saved)
    model.config.flatout_task = "sequence-classification"
    with pytest.raises(
        ModelError, match=r"computes no vectors: train one with model\."
    ):
        file, settings = TokenizerFile(saved), settings_of(tmp_path)
        mining.mine(model, file, splits, splits["train"], settings)


def test_negatives_are_those_of_sentence_transformers(saved, tmp_path):
    pytest.importorskip("sentence_transformers")
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import mine_hard_negatives

    splits = splits_of(frame_of())
    train = splits["train"]
    found = mined(saved, tmp_path, splits)
    found = found[found["split"] == "train"].explode("negative").dropna()
    pairs = {"anchor": train["text"][:], "positive": [p[0] for p in train["passages"]]}
    theirs = mine_hard_negatives(
        Dataset.from_dict(pairs),
        SentenceTransformer(str(saved), device="cpu"),
        range_max=TOP,
        num_negatives=NEGATIVES,
        absolute_margin=MARGIN,
        verbose=False,
    ).to_pandas()
    names = ["anchor", "positive", "negative"]
    assert len(found) > 50
    assert set(map(tuple, found[names].to_numpy())) == set(
        map(tuple, theirs[names].to_numpy())
    )
