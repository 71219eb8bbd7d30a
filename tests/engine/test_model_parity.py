"""Packed rows equal padded rows, and both equal the model in transformers."""

import logging
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from flatout.engine.ops.attention import PACKED
from flatout.engine.ops.row_by_row import Rule, row_by_row
from tests.engine.families import (
    BILM,
    BOTH_SIDES,
    CONFIGS,
    DECODERS,
    RECURRENT,
    gradient,
    joined_rows,
    plain_gradient,
    rows_of,
    short_rows,
    step_rows,
    task_model,
    token_rows,
)

task_model = cache(task_model)  # no test changes a model

ENCODER_CASES = [
    (family, task)
    for family in sorted(set(CONFIGS) - DECODERS)
    for task in (
        "sequence-classification",
        "multi-label-classification",
        "token-classification",
        "regression",
        "masked-lm",
    )
]
DECODER_CASES = [
    (family, task)
    for family in sorted(DECODERS)
    for task in (
        "sequence-classification",
        "multi-label-classification",
        "token-classification",
        "causal-lm",
    )
]

RECURRENT_CASES = [(family, "causal-lm") for family in RECURRENT]
BILM_CASES = [(family, "bidirectional-lm") for family in BILM]
OTHER_TASKS = ("multi-label-classification", "token-classification", "regression")
FEWER_CASES = [
    pytest.param(*case, marks=pytest.mark.slow if case[1] in OTHER_TASKS else ())
    for case in [*ENCODER_CASES, *DECODER_CASES, ("bert", "reranking")]
]


@pytest.mark.parametrize(("family", "task"), FEWER_CASES)
def test_packed_and_padded_give_the_same_loss_and_gradient(family, task):
    padded = task_model(family, task, "sdpa")
    packed = task_model(family, task, PACKED)
    one = gradient(padded, [step_rows(family, task, "random")[0]])
    other = gradient(packed, [step_rows(family, task, "packed")[0]])
    shaped = step_rows(family, task, "packed", pad_multiple=64, row_multiple=16)[0]
    filled = gradient(packed, [shaped])
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    torch.testing.assert_close(other[1], one[1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(filled[1], one[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "task"), ENCODER_CASES + DECODER_CASES + RECURRENT_CASES + BILM_CASES
)
def test_short_rows_of_every_strategy_equal_plain_models(family, task):
    """Rows of one and two tokens are mixed with others, on one and two ranks, and
    compared with each row alone. Padding does not affect the states of recurrent
    models."""
    rows = short_rows(task)
    data = step_rows(family, task, "random", rows=rows)
    expected = plain_gradient(family, task, data)
    assert expected[1].norm() > 0
    check_every_strategy(family, task, rows, expected)


@pytest.mark.parametrize("task", ["sequence-classification", "token-classification"])
@pytest.mark.parametrize("family", BOTH_SIDES)
def test_decoders_that_look_to_both_sides_equal_plain_transformers(family, task):
    rows = token_rows(task, 12)
    expected = plain_gradient(
        family, task, step_rows(family, task, "random", rows=rows)
    )
    check_every_strategy(family, task, rows, expected)


def check_every_strategy(family, task, rows, expected):
    padded, packed = (task_model(family, task, name) for name in ("sdpa", PACKED))
    strategies = ["fixed", "random", "grouped"]
    if family not in RECURRENT | BILM:
        strategies.append("packed")
    for strategy, ranks in product(strategies, (1, 2)):
        own = {"rows": rows, "token_budget": 48, "world_size": ranks}
        batches = [
            step_rows(family, task, strategy, rank=rank, **own)[0]
            for rank in range(ranks)
        ]
        model = packed if strategy == "packed" else padded
        loss, found = gradient(model, batches)
        assert loss == pytest.approx(expected[0], rel=1e-5)
        torch.testing.assert_close(found, expected[1], rtol=1e-4, atol=1e-6)


LANGUAGE_CASES = [(f, t) for f, t in ENCODER_CASES + DECODER_CASES if t.endswith("lm")]
LANGUAGE_CASES += BILM_CASES


@pytest.mark.parametrize(("family", "task"), LANGUAGE_CASES)
def test_joined_documents_equal_plain_transformers_on_each_alone(family, task):
    """Blocks of 20 tokens cut some of the documents of 1 to 24 tokens in two."""
    documents = short_rows(task)
    rows = joined_rows(documents, 20)
    assert len(rows) == 4
    ids = np.concatenate(documents.views(np.arange(len(documents))))
    cuts = sorted(
        {*np.cumsum(documents.lengths(np.arange(len(documents)))).tolist(), 20, 40, 60}
    )
    parts = rows_of(task, [part.tolist() for part in np.split(ids, cuts[:-1])])
    alone = step_rows(family, task, "random", rows=parts)
    if task == "masked-lm":  # masks depend on the block and the position in it
        alone = replace(alone, rows=rows.sequences(np.arange(4))[0])
        assert len(alone.rows) == len(parts)
    check_every_strategy(family, task, rows, plain_gradient(family, task, alone))


@pytest.mark.parametrize("task", ["sequence-classification", "masked-lm"])
def test_pad_tokens_inside_a_text_have_the_positions_of_transformers(task):
    """RoBERTa computes positions from the ids that are not padding."""
    texts = [[1, 7, 0, 8, 9, 2], [0, 5, 6, 2], [1, 0, 6, 0, 11, 2], [1, 5, 0, 0]]
    rows = rows_of(task, texts * 3)
    expected = plain_gradient(
        "roberta", task, step_rows("roberta", task, "random", rows=rows)
    )
    check_every_strategy("roberta", task, rows, expected)


def test_positions_do_not_depend_on_random_pieces():
    """Random pieces are no padding, which would shift the positions in RoBERTa."""
    padded, packed = (
        task_model("roberta", "masked-lm", name) for name in ("sdpa", PACKED)
    )
    rows = token_rows("masked-lm", 60)
    one, other = (
        step_rows("roberta", "masked-lm", kind, rows=rows, mask_probability=0.9)
        for kind in ("grouped", "packed")
    )
    for step in range(8):
        (loss, expected) = gradient(padded, [one[step]])
        (same, found) = gradient(packed, [other[step]])
        assert same == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "task"), ENCODER_CASES + DECODER_CASES + RECURRENT_CASES
)
def test_heads_and_narrowing_equal_the_whole_model(family, task):
    batch = step_rows(family, task, "random")[1]
    ours = task_model(family, task, "sdpa")
    whole = task_model(family, task, "sdpa", whole=True)
    tensors = batch.micro_batches[0]
    logits = ours.logits(tensors)
    assert len(logits) == len(batch.micro_batches[0]["labels"])
    torch.testing.assert_close(logits, whole.logits(tensors), rtol=1e-4, atol=1e-5)
    found = gradient(ours, [batch])[1]
    assert found.norm() > 0
    torch.testing.assert_close(found, gradient(whole, [batch])[1], rtol=1e-4, atol=1e-6)


def test_attention_for_targets_alone_equals_attention_for_all():
    """Two, none and one of 3, 1 and 5 tokens are requested, one of them twice."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, 2, 4, requires_grad=True) for _ in range(3))
    bounds = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    rule = Rule(0.5, 0.0, False, -1, -1)
    targets = torch.tensor([6, 0, 2, 6])
    whole = row_by_row(q, k, v, bounds, rule)
    some = row_by_row(q, k, v, bounds, rule, targets)
    torch.testing.assert_close(some[targets], whole[targets])
    assert some[[1, 3, 4, 5, 7, 8]].eq(0).all()
    grads = [
        torch.autograd.grad(o[targets].square().sum(), (q, k, v)) for o in (whole, some)
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_new_model_names_no_token_beyond_its_vocabulary(family, caplog):
    said = logging.getLogger("transformers")
    said.addHandler(caplog.handler)
    config = task_model(family, "sequence-classification", "sdpa").model.config
    said.removeHandler(caplog.handler)
    assert "within the vocabulary" not in caplog.text
    for name in ("bos_token_id", "eos_token_id", "cls_token_id", "pad_token_id"):
        token = getattr(config, name, None)
        assert token is None or token < config.vocab_size, name
