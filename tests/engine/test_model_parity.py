"""Packed equals padded, and both equal the model as transformers runs it."""

import pytest
import torch

from flatout.engine.attention import PACKED
from flatout.engine.heads import DECODERS
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
