"""Parts of a model that are replaced in a compiled step on a GPU."""

import copy
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import (
    clear_compilation_metrics,
    counters,
    get_compilation_metrics,
)

from flatout.engine.families import FusePlan, family_of
from flatout.engine.families.decoders import Llama
from flatout.engine.models import compilation
from flatout.engine.models.compilation import compiled
from flatout.engine.ops import blocks, joined_blocks
from flatout.engine.ops.attention import PACKED
from flatout.engine.ops.dropout import Noise, replace_dropout
from flatout.engine.ops.joined_blocks import (
    fuse_bert,
    fuse_decoder,
    fuse_distilbert,
    fuse_gates,
)
from flatout.engine.ops.precision import round_residual_stream
from flatout.engine.ops.row_by_row import row_by_row
from flatout.engine.parameters import TrainSettings
from flatout.engine.train.setup.assemble import may_fuse_projections
from tests.engine.families import CONFIGS, DECODERS, task_model

ENGINE = Path(compilation.__file__).parents[1]
IDS = torch.tensor([[1, 7, 9, 55, 2], [1, 80, 6, 14, 2]])


def gradients(model, ids=IDS, **given):
    """Return the output, and the gradient of its weighted sum by parameter name."""
    model.zero_grad()
    hidden = model.base_model(input_ids=ids, **given).last_hidden_state
    weights = torch.linspace(-1, 1, hidden.numel()).view_as(hidden)
    (hidden.float() * weights).sum().backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return hidden.detach(), copy.deepcopy(found)


def plain(family):
    torch.manual_seed(0)
    task = "causal-lm" if family in DECODERS else "sequence-classification"
    return task_model(family, task, "sdpa", whole=True).model


def packed_gradients(model):
    """Return `gradients` for concatenated rows of 5, 3 and 1 tokens."""
    bounds = torch.tensor([0, 5, 8, 9], dtype=torch.int32)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0]])
    given = {"position_ids": positions, "cu_seqlens": bounds, "max_seqlen": 5}
    return gradients(model, torch.tensor([[1, 7, 9, 55, 2, 1, 80, 6, 14]]), **given)


def by_row(qkv, heads, bounds, longest, rule):
    """Replace the GPU kernel on a CPU."""
    groups = (qkv.shape[1] - heads) // 2
    return row_by_row(*qkv.split([heads, groups, groups], 1), bounds, rule)


def assert_same(found, wanted):
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_attention_by_one_product_changes_nothing(family, monkeypatch):
    monkeypatch.setattr(joined_blocks, "joined_attention", by_row)
    torch.manual_seed(0)
    model = task_model(family, "token-classification", PACKED, whole=True).model
    wanted, names = packed_gradients(model), list(model.state_dict())
    fuse = fuse_distilbert if family == "distilbert" else fuse_bert
    assert fuse(model) == 2
    assert list(model.state_dict()) == names
    assert_same(packed_gradients(model), wanted)


@pytest.mark.parametrize("family", sorted(Llama.model_types))
def test_gate_and_up_as_one_product_change_nothing(family):
    model = plain(family)
    wanted, names = gradients(model), list(model.state_dict())
    assert fuse_gates(model) == 2
    assert list(model.state_dict()) == names
    assert_same(gradients(model), wanted)


PLAN = FusePlan(
    noise=Noise(torch.device("cpu")),
    joined=True,
    residual_bf16=True,
    has_triton=True,
)


def test_no_products_are_joined_where_layers_are_computed_again_or_sharded():
    assert may_fuse_projections(TrainSettings())
    assert not may_fuse_projections(TrainSettings(gradient_checkpointing=True))
    assert not may_fuse_projections(TrainSettings(distributed={"strategy": "fsdp"}))


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("bert", ["BertEmbeddings", "BertLayer", "BertLayer"]),
        ("gpt2", ["Dropout", "GPT2Block", "GPT2Block", "LayerNorm"]),
        ("qwen3", ["Qwen3DecoderLayer", "Qwen3DecoderLayer", "Qwen3RMSNorm"]),
        ("distilbert", ["TaskModel"]),  # compiled as a whole
    ],
)
def test_what_is_compiled(family, names):
    task = "causal-lm" if family in DECODERS else "sequence-classification"
    whole = compiled(task_model(family, task, "sdpa"), backend="eager")
    found = [type(m).__name__ for m in whole.modules() if m._compiled_call_impl]
    assert sorted(found) == names


def narrowed_gradients(made, backend):
    """Return the gradients of the classifier that `made` creates. It is compiled if
    `backend` is given."""
    torch.manual_seed(0)
    whole = made()
    assert whole.narrow_points
    if backend:
        torch._dynamo.reset()
        counters.clear()
        assert compiled(whole, backend=backend) is whole
    for module in whole.narrow_points:
        module.target_index = torch.tensor([0, 5])
    return gradients(whole.model)


@pytest.mark.slow
def test_a_narrowed_gated_layer_is_compiled_as_it_is():
    made = partial(task_model, "modernbert", "sequence-classification", "sdpa")
    wanted = narrowed_gradients(made, None)
    assert wanted[0].shape == (1, 2, 16)
    assert_same(narrowed_gradients(made, "aot_eager"), wanted)


def bert_with_dropout():
    """Return a BERT in which each layer has its own dropout rates."""
    whole = task_model("bert", "sequence-classification", "sdpa")
    whole.model.train()
    for module in whole.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    for layer in whole.model.base_model.encoder.layer:
        layer.attention.self.dropout.p = 0.0  # attention draws its own random numbers
    assert replace_dropout(whole.model, Noise(torch.device("cpu"))) == 8
    return whole


def test_blocks_that_are_alike_are_compiled_once(monkeypatch):
    """BERT has three kinds: the embeddings, its layers, and the last layer, which is
    given its targets."""
    monkeypatch.setitem(CONFIGS, "bert", {**CONFIGS["bert"], "num_hidden_layers": 3})
    wanted = narrowed_gradients(bert_with_dropout, None)
    assert_same(narrowed_gradients(bert_with_dropout, "eager"), wanted)
    assert counters["stats"]["unique_graphs"] == 3


SLOW = (pytest.param(family, marks=pytest.mark.slow) for family in ("gpt2", "qwen3"))


@pytest.mark.parametrize("family", ["bert", *SLOW])
def test_no_block_is_traced_twice(family):
    """Dropout probabilities and similar values used to be variables that needed
    guards."""
    torch._dynamo.reset()
    clear_compilation_metrics()
    model = task_model(family, "sequence-classification", "sdpa", whole=True)
    compiled(model, backend="eager").train()
    gradients(model.model)
    found = get_compilation_metrics()
    assert found
    assert {reason for one in found for reason in one.restart_reasons or ()} == set()


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_blocks_are_fused_in_bert_and_roberta_alone(family):
    model = task_model(family, "sequence-classification", "sdpa").model
    family_of(model.config).fuse(model, replace(PLAN, joined=False))
    fused = [m for m in model.modules() if type(m).__module__ == blocks.__name__]
    # Each of two layers has two output blocks.
    assert len(fused) == (4 if family in {"bert", "roberta"} else 0)


@pytest.mark.parametrize("family", sorted(Llama.model_types))
def test_attention_of_decoders_is_fused(family):
    model = plain(family)
    names = list(model.state_dict())
    assert fuse_decoder(model) == 2
    assert list(model.state_dict()) == names
    attention = model.base_model.layers[0].self_attn
    assert type(attention).__module__ == joined_blocks.__name__
    assert attention.heads == 2
    assert attention.span == (6 if family == "mistral" else None)


def test_heads_that_turn_in_part_are_left_alone():
    model = plain("llama")
    rotary = model.base_model.rotary_emb
    rotary.inv_freq = rotary.inv_freq[:-1]
    assert fuse_decoder(model) == 0
    rotary.inv_freq = torch.ones(4)
    assert fuse_decoder(model) == 2


def test_the_name_of_kept_graphs_holds_our_sources():
    """Otherwise, PyTorch would reuse graphs with kernels of another version."""
    with torch.compiler.config.patch(cache_key_tag="mine-"):
        model = task_model("bert", "sequence-classification", "sdpa")
        for _ in range(2):
            compiled(model, backend="eager")
        tag = torch.compiler.config.cache_key_tag
    assert tag == f"mine-flatout-{compilation.sources_digest()}"


@pytest.mark.parametrize(
    "changed",
    [
        "models/compilation.py",
        "ops/plain.py",
        "ops/kernels/row_attention/tiles.py",
    ],
)
def test_another_version_finds_no_graphs_of_this_one(monkeypatch, tmp_path, changed):
    mine = compilation.sources_digest()
    for folder in ("models", "ops"):
        shutil.copytree(ENGINE / folder, tmp_path / folder)
    monkeypatch.setattr(compilation, "__file__", str(tmp_path / "models" / "any.py"))
    digest = compilation.sources_digest.__wrapped__
    assert digest() == mine
    with (tmp_path / changed).open("a") as file:
        file.write("changed")
    assert digest() != mine


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_rounded_residual_stream_stays_in_the_rounding_of_bf16(family):
    """This is the relative error of the gradient compared with fp32. bf16 rounds to 0.4
    %."""
    model = plain(family)
    _, exact = gradients(model)
    assert round_residual_stream(model) > 0
    with torch.autocast("cpu", torch.bfloat16):
        hidden, found = gradients(model)
    assert hidden.dtype == torch.bfloat16
    square = sum((found[name] - g).square().sum() for name, g in exact.items())
    assert (square / sum(g.square().sum() for g in exact.values())).sqrt() < 0.02


def test_without_autocast_nothing_is_rounded():
    model = plain("bert")
    before, _ = gradients(model)
    round_residual_stream(model)
    after, _ = gradients(model)
    assert torch.equal(after, before)
