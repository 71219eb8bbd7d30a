"""Predict by a language model: each text's loss is that of plain transformers."""

from __future__ import annotations

import math

import pandas as pd
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import AutoTokenizer

from flatout.engine.families import usable_positions
from flatout.engine.models.building import (
    ModelError,
    Vocabulary,
    build,
    load_pretrained,
)
from flatout.engine.parameters import ModelSettings, TokenizeSettings, parse_settings
from flatout.engine.predict.checks import answering_task
from flatout.engine.predict.predicting import predict
from flatout.engine.tasks import make_task
from flatout.engine.tokenizing.tokenizer import TokenizerFile, tokenizer_recipe
from tests.engine.families import BILM, CONFIGS
from tests.engine.test_predict import texts

LIMITS = TokenizeSettings(vocab_size=100, max_length=24)


def saved(folder, task, family):
    """A model whose scores differ from text to text, with its tokenizer."""
    sizes = (CONFIGS | BILM)[family]
    settings = ModelSettings(task=task, config={"model_type": family, **sizes})
    rows = Dataset.from_dict({"text": texts(60)})
    made = tokenizer_recipe(rows, settings, LIMITS, usable_positions).build()[0]
    made.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    model = build(
        settings, make_task(settings), Vocabulary.of(tokenizer), 24, "eager"
    ).eval()
    for weight in model.parameters():
        weight.data *= 4 if weight.dim() > 1 else 1
    model.save_pretrained(folder)
    return model, tokenizer


def plain_loss(model, task, ids):
    """Mean over the targets of one text, and their number."""
    logits = model(input_ids=ids).logits[0]
    if task == "causal-lm":
        scores, targets = logits[:-1], ids[0, 1:]
    else:
        scores = torch.cat([logits[:-1, 0], logits[1:, 1]])
        targets = torch.cat([ids[0, 1:], ids[0, :-1]])
    return nn.functional.cross_entropy(scores, targets).item(), len(targets)


@pytest.mark.parametrize(
    ("task", "family", "strategy"),
    [
        ("causal-lm", "llama", "grouped"),
        ("causal-lm", "llama", "packed"),
        ("bidirectional-lm", "bilm", "grouped"),
    ],
)
@torch.no_grad()
def test_a_text_is_scored_as_by_plain_transformers(tmp_path, task, family, strategy):
    model, tokenizer = saved(tmp_path, task, family)
    given = [*texts(30), "", texts(1)[0][:1]]
    chosen = parse_settings(
        {
            "runtime": {"precision": "fp32", "threads": 1},
            "model": {"task": task, "name_or_path": str(tmp_path)},
            "tokenize": {"max_length": 24},
            "predict": {"strategy": strategy, "token_budget": 100},
        }
    )
    answers = predict(
        load_pretrained(tmp_path),
        TokenizerFile(tmp_path),
        pd.DataFrame({"text": given}),
        chosen,
    )
    rows = pa.Table.from_batches(answers.batches(), answers.schema).to_pylist()
    assert answers.predictor.strategy == strategy
    scored = 0
    for text, row in zip(given, rows, strict=True):
        if not text:
            assert row["reason"] and row["loss"] is row["perplexity"] is None
            continue
        ids = tokenizer(text).input_ids
        if task == "causal-lm":  # the tokenizer adds none, so that prompts have no end
            ids = [*ids, tokenizer.eos_token_id]
        cut = torch.tensor([ids[:24]])  # a text that is cut has no end
        if cut.shape[1] < 2:
            assert (row["targets"], row["loss"]) == (0, None)
            continue
        loss, targets = plain_loss(model, task, cut)
        assert row["targets"] == targets
        assert row["loss"] == pytest.approx(loss, rel=1e-4)
        assert row["perplexity"] == pytest.approx(math.exp(loss), rel=1e-3)
        scored += 1
    assert scored >= 30
    losses = [row["loss"] for row in rows if row["loss"]]
    assert max(losses) - min(losses) > 0.1


def test_a_masked_model_scores_no_text(tmp_path):
    model, _ = saved(tmp_path, "masked-lm", "bert")
    settings = ModelSettings(task="masked-lm", name_or_path=str(tmp_path))
    with pytest.raises(ModelError, match="BertForMaskedLM; predict takes models"):
        answering_task(model, settings, None)
