"""Positions that depend on the batch, and custom families for known model types."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from flatout.engine.families import family_of_type
from flatout.engine.families._family import Family
from flatout.engine.families.decoders import Llama
from flatout.engine.models.building import build
from flatout.engine.parameters import ModelSettings, SettingsError
from flatout.engine.tasks import make_task
from tests.engine.families import CONFIGS, VOCABULARY

LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.0, 1.0, 1.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 8,
    "factor": 8.0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}


@pytest.mark.parametrize("rope", [LONG, DYNAMIC])
def test_positions_that_depend_on_the_longest_row_are_refused(rope):
    """In transformers, longer rows in the batch affect a short row's result."""
    sizes = {**CONFIGS["llama"], "max_position_embeddings": 64 if rope is LONG else 8}
    config = {"model_type": "llama", **sizes, "rope_parameters": rope}
    settings = ModelSettings(task="causal-lm", config=config)
    task = make_task(settings, (), VOCABULARY)
    with pytest.raises(SettingsError, match=r"over 8 tokens|model's 8 positions"):
        build(settings, task, VOCABULARY, 24)
    model = build(settings, task, VOCABULARY, 8).eval()
    plain = AutoModelForCausalLM.from_config(model.config).eval()
    plain.load_state_dict(model.state_dict())
    for weight in plain.parameters():
        weight.data *= 10 if weight.dim() > 1 else 1
    short, long = torch.arange(5, 11), torch.arange(5, 25)
    padded = torch.stack([torch.nn.functional.pad(short, (0, 14)), long])
    with torch.no_grad():
        alone = plain(short[None]).logits[0]
        beside = plain(padded, attention_mask=(padded > 0).long()).logits[0, :6]
    assert (alone - beside).abs().max() > 1e-3 * alone.abs().max()


def test_a_family_of_ones_own_goes_before_ours():
    assert type(family_of_type("llama")) is Llama

    class Own(Family):
        model_types = frozenset({"llama"})

    try:
        assert type(family_of_type("llama")) is Own
    finally:
        Family.known.remove(Own)
    assert type(family_of_type("llama")) is Llama
