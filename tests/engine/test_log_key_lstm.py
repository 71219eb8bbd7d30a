"""The LSTM for log keys compared with plain PyTorch, on disk, and in the engine."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from flatout.engine.families import family_of
from flatout.engine.machine.runtime import set_up
from flatout.engine.models.building import build, load_pretrained
from flatout.engine.models.memory import count_parameters
from flatout.engine.parameters import ModelSettings
from flatout.engine.train.setup.assemble import assemble
from tests.engine.families import (
    MAX_LENGTH,
    VOCABULARY,
    built,
    gradient,
    step_rows,
    task_model,
    task_of,
)
from tests.engine.plain import job_for, save_start

INHERITED = {"num_attention_heads": 2, "max_position_embeddings": 8}
"""Settings that conf/base gives to every model."""


def model_of(**sizes):
    torch.manual_seed(0)
    config = {"model_type": "log_key_lstm", "hidden_size": 16, **INHERITED, **sizes}
    settings = ModelSettings(task="causal-lm", config=config)
    return build(settings, task_of("causal-lm"), VOCABULARY, MAX_LENGTH).eval()


def keys_of(rows=3, length=12):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(5, 100, (rows, length), generator=generator)


@torch.no_grad()
def test_it_is_pytorchs_lstm():
    model = model_of(num_hidden_layers=3)
    plain = nn.Sequential(nn.Embedding(100, 16), nn.LSTM(16, 16, 3, batch_first=True))
    names = ("model.embeddings", "model.lstm")
    for part, name in zip(plain, names, strict=True):
        part.load_state_dict(model.get_submodule(name).state_dict())
    keys = keys_of()
    states = plain(keys)[0]
    expected = states @ model.lm_head.weight.T + model.lm_head.bias
    torch.testing.assert_close(model(keys).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("window", [1, 2, 5, 9, 10, 11, 12, 40])
def test_a_window_sees_its_last_keys_and_no_others(window):
    model, keys = model_of(window_keys=window), keys_of()
    logits = model(keys).logits
    for at in range(keys.shape[1]):
        seen = keys[:, max(0, at - window + 1) : at + 1]
        states = model.model.lstm(model.model.embeddings(seen))[0][:, -1]
        torch.testing.assert_close(logits[:, at], model.lm_head(states))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("window", [2, 5])
@pytest.mark.parametrize("few", [True, False])
def test_windows_that_occur_again_have_the_gradient_of_each(window, few, dtype):
    """Three keys occur at 40 positions, of which some or all are requested. The result
    is compared with a separate row for each window."""
    model, keys = model_of(window_keys=window).to(dtype), keys_of(4, 10) % 3
    places = torch.tensor([0, 3, 3, 9, 10, 25, 39]) if few else torch.arange(40)
    model.train()
    states = model.model(keys, places=places if few else None).last_hidden_state
    assert states.shape == ((1, 7, 16) if few else (4, 10, 16))
    states.square().sum().backward()
    found = {n: p.grad.clone() for n, p in model.model.named_parameters()}
    model.zero_grad()
    plain = model.model
    for row, at in zip(places // 10, places % 10, strict=True):
        seen = keys[None, row, max(0, at - window + 1) : at + 1]
        plain.lstm(plain.embeddings(seen))[0][:, -1].square().sum().backward()
    near = {} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, **near)


def test_a_micro_batch_without_targets_has_no_states_and_no_gradient():
    """Such a micro-batch has only rows whose labels are all ignored."""
    model = model_of(window_keys=3).model.train()
    none = torch.zeros(0, dtype=torch.int64)
    states = model(keys_of(), places=none).last_hidden_state
    assert states.shape == (1, 0, 16)
    states.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("key", [-1, 100])
def test_a_key_outside_of_the_vocabulary_is_an_error(key):
    with pytest.raises(IndexError):
        model_of(window_keys=3)(torch.tensor([[5, 6, key, 7, 8]]))


def test_equal_windows_do_not_share_what_dropout_draws():
    model = model_of(window_keys=3, dropout=0.5).train()
    logits = model(torch.full((2, 9), 7)).logits
    assert len(logits.flatten(0, 1)[2:].unique(dim=0)) > 10


def test_targets_at_every_place_have_the_gradient_of_those_that_are_there():
    model = task_model("log_key_lstm", "causal-lm", "eager")
    kind = ("log_key_lstm", "causal-lm", "grouped")
    few, every = (step_rows(*kind, every_place=own)[0] for own in (False, True))
    for micro, own in zip(every.micro_batches, few.micro_batches, strict=True):
        assert len(micro["labels"]) == micro["input_ids"].numel() > len(own["labels"])
    found, expected = gradient(model, [every]), gradient(model, [few])
    assert found[0] == pytest.approx(expected[0])
    torch.testing.assert_close(found[1], expected[1])


def test_what_conf_base_says_of_transformers_is_left_alone():
    model = model_of()
    assert not hasattr(model.config, "num_attention_heads")
    assert not hasattr(model.config, "max_position_embeddings")
    weights = sum(p.numel() for p in model.parameters())
    settings = ModelSettings(task="causal-lm", config={"model_type": "log_key_lstm"})
    assert count_parameters(model.config, settings) == weights
    assert not family_of(model.config).schedule.compiles


BARE = """
import sys, torch, transformers
for name in sys.argv[1:]:
    Auto = getattr(transformers, name)
    model = Auto.from_pretrained(name, trust_remote_code=True).eval()
    kept = torch.load(f"{name}.pt")
    torch.testing.assert_close(model(kept["keys"]).logits, kept["logits"])
transformers.AutoModel.from_pretrained(name, trust_remote_code=True)
assert "flatout" not in sys.modules
"""


@pytest.mark.slow
def test_saved_ones_load_here_and_where_flatout_is_not(tmp_path, monkeypatch):
    """Models of both directions are included."""
    monkeypatch.chdir(tmp_path)
    both = built("bilm-projected", "bidirectional-lm", "eager").eval()
    models = {"AutoModelForCausalLM": model_of(), "AutoModelForPreTraining": both}
    keys = keys_of()
    for name, model in models.items():
        model.save_pretrained(name)
        with torch.no_grad():
            expected = model(keys).logits
            for load in (load_pretrained, getattr(transformers, name).from_pretrained):
                torch.testing.assert_close(load(name).eval()(keys).logits, expected)
        torch.save({"keys": keys, "logits": expected}, f"{name}.pt")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", BARE, *models], env=environment, check=True)


def test_windows_of_a_step_are_one_micro_batch(tmp_path):
    """Whole sessions would be padded and divided into several smaller micro-batches."""
    counts = {}
    for window in (5, None):
        start = save_start(tmp_path / f"{window}", "next-key", window_keys=window)
        job = job_for(tmp_path, "next-key", start, token_budget=8_192)
        data = assemble(job, set_up(job.settings.runtime)).data
        lengths = np.array([24] * 4 + [3] * 60)
        counts[window] = len(data.planner.plan(lengths)[0])
    assert counts == {5: 1, None: 2}
