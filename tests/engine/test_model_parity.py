"""Packed equals padded, and both equal the model as transformers runs it."""

import logging

import pytest
import torch

from flatout.engine.attention import PACKED
from flatout.engine.heads import DECODERS
from flatout.engine.row_by_row import Rule, row_by_row
from tests.engine.families import CONFIGS, gradient, step_rows, task_model

ENCODER_CASES = [
    (family, task)
    for family in sorted(set(CONFIGS) - DECODERS)
    for task in ("sequence-classification", "regression", "masked-lm")
]
DECODER_CASES = [
    (family, task)
    for family in sorted(DECODERS)
    for task in ("sequence-classification", "causal-lm")
]


@pytest.mark.parametrize(("family", "task"), ENCODER_CASES + DECODER_CASES)
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


@pytest.mark.parametrize(("family", "task"), ENCODER_CASES + DECODER_CASES)
def test_heads_and_narrowing_equal_the_whole_model(family, task):
    batch = step_rows(family, task, "random")[1]
    ours = task_model(family, task, "sdpa")
    whole = task_model(family, task, "sdpa", whole=True)
    tensors = batch.micro_batches[0].tensors()
    logits = ours.logits(tensors)
    assert len(logits) == len(batch.micro_batches[0].labels)
    torch.testing.assert_close(logits, whole.logits(tensors), rtol=1e-4, atol=1e-5)
    found = gradient(ours, [batch])[1]
    assert found.norm() > 0
    torch.testing.assert_close(found, gradient(whole, [batch])[1], rtol=1e-4, atol=1e-6)


def test_attention_for_targets_alone_equals_attention_for_all():
    """Rows of 3, 1 and 5 tokens; two, none and one of them are asked for, one twice."""
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
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


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
