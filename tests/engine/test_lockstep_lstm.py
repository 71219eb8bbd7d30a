"""LSTMs side by side against `torch.nn.LSTM`. Their kernels: test_kernels.py."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from flatout.engine.families import FusePlan, family_of
from flatout.engine.families._modeling.bilm import BilmConfig, BilmForPreTraining
from flatout.engine.ops.dropout import Noise
from flatout.engine.ops.lstm import lockstep_lstm, weights_of

PLAN = FusePlan(
    noise=Noise(torch.device("cpu")),
    joined=False,
    residual_bf16=False,
    narrowed=False,
    compiled=False,
    has_triton=True,
)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_states_and_all_gradients_are_those_of_pytorch(dtype, steps):
    torch.manual_seed(0)
    layers = [
        nn.LSTM(5, 8, proj_size=3, batch_first=True, dtype=dtype) for _ in range(2)
    ]
    inputs = torch.randn(2, steps, 4, 5, dtype=dtype, requires_grad=True)
    pairs = zip(layers, inputs.transpose(1, 2), strict=True)
    want = torch.stack([layer(own)[0].transpose(0, 1) for layer, own in pairs])
    found = lockstep_lstm(inputs, weights_of(layers, dtype))
    torch.testing.assert_close(found, want)
    given = [inputs, *(p for layer in layers for p in layer.parameters())]
    grad = torch.randn_like(want)
    for one, other in zip(
        torch.autograd.grad(found, given, grad),
        torch.autograd.grad(want, given, grad),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def bilm(**sizes):
    given = {"hidden_size": 128, "projection_size": 64, "dropout": 0.0, **sizes}
    config = BilmConfig(vocab_size=50, num_hidden_layers=2, **given)
    return BilmForPreTraining(config)


def fused(model):
    model = deepcopy(model)
    family_of(model.config).fuse(model, PLAN)
    return model


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("residual", [True, False])
def test_the_model_computes_the_same_of_padded_rows(residual):
    """States of all layers, scores, and gradients; rows of 9, 4 and 1 tokens."""
    torch.manual_seed(0)
    model = bilm(embedding_size=64, residual=residual)
    other = fused(model)
    assert type(other.bilm) is not type(model.bilm)
    mask = (torch.arange(9) < torch.tensor([[9], [4], [1]])).long()
    ids = torch.randint(1, 50, (3, 9)) * mask
    real = mask.bool()
    want, found = (
        [out.logits[real], *(states[real] for states in out.hidden_states)]
        for out in (one(ids, mask, output_hidden_states=True) for one in (model, other))
    )
    torch.testing.assert_close(found, want)
    for states in (want, found):
        states[0].square().sum().backward()
    for one, its in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, its.grad, rtol=1e-4, atol=1e-5)


def test_what_is_saved_is_the_model_as_it_was(tmp_path):
    """The same weights under the same names, and the code that reads them."""
    model = bilm(embedding_size=8)
    fused(model).save_pretrained(tmp_path)
    again = BilmForPreTraining.from_pretrained(tmp_path)
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()))
    assert type(again.bilm) is type(model.bilm)
    assert (tmp_path / "bilm.py").is_file()


@pytest.mark.parametrize("sizes", [{"projection_size": None}, {"hidden_size": 100}])
def test_sizes_that_fill_no_tile_stay_with_cudnn(sizes):
    model = bilm(**sizes)
    assert type(fused(model).bilm) is type(model.bilm)
