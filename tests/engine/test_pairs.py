"""Training, predict and plain transformers see the same rows for pairs of texts."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from flatout.engine.data.raw_texts import RawTextsError
from flatout.engine.models.building import load_pretrained
from flatout.engine.parameters import (
    ModelSettings,
    SettingsError,
    SplitSettings,
    TokenizeSettings,
)
from flatout.engine.predict.predicting import predict
from flatout.engine.rows.rows import rows_from_dataset
from flatout.engine.tasks import columns_of
from flatout.engine.tokenizing.encoders.encoded import TokensError
from flatout.engine.tokenizing.token_recipes import tokens_recipe
from tests.engine.families import CONFIGS, LABEL_NAMES, collator_of
from tests.engine.test_predict import texts
from tests.make import exact_settings, save_random, saved_tokenizer

LIMITS = TokenizeSettings(vocab_size=100, max_length=24)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "modernbert"])
def test_a_tokenizer_trained_on_pairs_gives_everybody_the_same(family, tmp_path):
    one, other = texts(30), texts(60)[30:]
    labels = [LABEL_NAMES[n % 3] for n in range(30)]
    rows = Dataset.from_dict({"text": one, "text_pair": other, "label": labels})
    settings = ModelSettings(config={"model_type": family, **CONFIGS[family]})
    file = saved_tokenizer(tmp_path, rows, settings, LIMITS)
    plain = AutoTokenizer.from_pretrained(tmp_path)
    expected = plain(one, other, truncation=True, max_length=24)
    recipe = tokens_recipe("train", rows, file, LABEL_NAMES, settings, LIMITS)
    tokens = recipe.to_dataset()
    assert tokens["input_ids"][:] == expected["input_ids"]
    typed = family in ("bert", "roberta")
    assert ("token_type_ids" in tokens.column_names) == typed
    assert ("token_type_ids" in expected) == typed
    if typed:
        assert tokens["token_type_ids"][:] == expected["token_type_ids"]

    save_random(tmp_path, tmp_path, settings, LABEL_NAMES, factor=4)
    model = load_pretrained(tmp_path).eval()
    with torch.no_grad():
        padded = plain.pad(dict(expected), return_tensors="pt")
        logits = model(**padded).logits
    frame = pd.DataFrame({"text": one, "text_pair": other})
    chosen = exact_settings(
        tokenize={"max_length": 24}, predict={"text_pair_column": "text_pair"}
    )
    answers = predict(load_pretrained(tmp_path), file, frame, chosen)
    table = pa.Table.from_batches(answers.batches(), answers.schema).to_pandas()
    found = table[[f"probability_{name}" for name in LABEL_NAMES]].to_numpy()
    assert np.abs(found - logits.softmax(-1).numpy()).max() < 1e-5
    assert logits.softmax(-1).std(0).max() > 1e-4  # 10 times

    batch = collator_of("sequence-classification", max_length=24).collate(
        rows_from_dataset(tokens), np.arange(30), 0
    )
    for name, values in padded.items():
        assert torch.equal(batch[name].long(), values), name


@pytest.mark.parametrize(
    ("task", "columns"),
    [
        ("token-classification", {}),
        ("causal-lm", {"prompt_column": "q", "completion_column": "a"}),
        ("causal-lm", {"messages_column": "talk"}),
    ],
)
def test_rows_with_no_place_for_a_second_text_refuse_it(task, columns):
    settings = SplitSettings(text_pair_column="other", **columns)
    with pytest.raises(RawTextsError, match=f"cannot be used with model.task {task}"):
        columns_of(settings, task)


def test_pairs_are_not_joined(tmp_path):
    rows = Dataset.from_dict({"text": texts(30), "text_pair": texts(30)})
    settings = ModelSettings(task="masked-lm", config={"model_type": "bert"})
    file = saved_tokenizer(tmp_path, rows, settings, LIMITS)
    joined = LIMITS.model_copy(update={"join_texts": True})
    with pytest.raises(TokensError, match=r"split with split\.text_pair_column"):
        tokens_recipe("train", rows, file, [], settings, joined)


def test_a_model_that_tags_words_refuses_a_second_text(tmp_path):
    rows = Dataset.from_dict({"text": texts(30)})
    config = {"model_type": "bert", **CONFIGS["bert"]}
    settings = ModelSettings(task="token-classification", config=config)
    file = saved_tokenizer(tmp_path, rows, settings, LIMITS)
    save_random(tmp_path, tmp_path, settings, LABEL_NAMES)
    frame = pd.DataFrame({"text": texts(3), "other": texts(3)})
    chosen = exact_settings(predict={"text_pair_column": "other"})
    with pytest.raises(SettingsError, match="task token-classification, which reads"):
        predict(load_pretrained(tmp_path), file, frame, chosen)
