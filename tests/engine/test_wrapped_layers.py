"""Modified layers (with adapters, quantisation or hooks) compute the same as in plain
PyTorch, whatever is fused around them."""

from dataclasses import replace
from types import MethodType, SimpleNamespace

import pytest
import torch
from transformers import (
    BertForSequenceClassification,
    ViTConfig,
    ViTForImageClassification as ViT,
)

from flatout.engine.families import OWN_CODE, family_of, note_own_code
from flatout.engine.families._modeling.vit_blocks import FirstTokenLayer
from flatout.engine.models.model import TaskModel
from flatout.engine.ops import joined_blocks
from flatout.engine.ops.attention import PACKED
from flatout.engine.tasks.bidirectional_lm import BidirectionalLM
from flatout.engine.tasks.causal_lm import CausalLM
from flatout.engine.train.setup import assemble
from tests.engine.families import DECODERS, built, no_dropout, task_model, task_of
from tests.engine.test_compiled_parts import (
    PLAN,
    assert_same,
    by_row,
    gradients,
    packed_gradients,
    plain,
)

ATTENTION = replace(PLAN, residual_bf16=False)
BLOCKS = replace(PLAN, joined=False)
FUSED = {
    "bert": {
        ATTENTION: ["query", "key", "value"],
        BLOCKS: ["dense", "LayerNorm", "dropout"],
    },
    "roberta": {ATTENTION: ["query"], BLOCKS: ["dense"]},
    "distilbert": {ATTENTION: ["q_lin", "v_lin"]},
    "modernbert": {ATTENTION: ["attn", "Wqkv"]},
    "qwen3": {ATTENTION: ["q_proj", "k_norm", "gate_proj", "up_proj"]},
    "llama": {ATTENTION: ["v_proj", "up_proj"]},
}
CASES = [
    (family, plan, name, "class")
    for family, plans in FUSED.items()
    for plan, names in plans.items()
    for name in names
]
CASES += [
    (*case, how)
    for case in (
        ("bert", ATTENTION, "value"),
        ("bert", BLOCKS, "dense"),
        ("bert", BLOCKS, "LayerNorm"),
        ("bert", BLOCKS, "dropout"),
        ("qwen3", ATTENTION, "k_norm"),
        ("distilbert", ATTENTION, "k_lin"),
        ("qwen3", ATTENTION, "gate_proj"),
    )
    for how in ("hook", "forward")
]


def changed(layer, how):
    """Modify `layer` so that its output is multiplied by 1.5."""
    if how == "hook":
        layer.register_forward_hook(lambda module, inputs, out: 1.5 * out)
        return
    kind = type(layer)

    def forward(self, *inputs, **named):
        out = kind.forward(self, *inputs, **named)
        more = 1.5 * (out[0] if isinstance(out, tuple) else out)
        return (more, *out[1:]) if isinstance(out, tuple) else more

    if how == "forward":
        layer.forward = MethodType(forward, layer)
    else:
        own = {"__module__": __name__, "forward": forward}
        layer.__class__ = type(f"Adapted{kind.__name__}", (kind,), own)


def change_all(model, name, how="class"):
    found = [m for path, m in model.named_modules() if path.endswith(f".{name}")]
    assert found
    for layer in found:
        changed(layer, how)


@pytest.mark.parametrize(("family", "plan", "name", "how"), CASES)
def test_a_layer_that_was_changed_is_never_bypassed(
    family, plan, name, how, monkeypatch
):
    """Hidden states and gradients are the same with and without fusion."""
    monkeypatch.setattr(joined_blocks, "joined_attention", by_row)
    torch.manual_seed(0)
    attends = plan is ATTENTION and family not in ("qwen3", "llama", "modernbert")
    task = "causal-lm" if family in DECODERS else "sequence-classification"
    model = built(family, task, PACKED if attends else "sdpa")
    found = packed_gradients if attends else gradients
    unchanged = found(model)
    change_all(model.base_model, name, how)
    expected = found(model)
    assert not torch.equal(expected[0], unchanged[0])
    if attends:  # kernels for adjacent layers do not run on a CPU
        plan = replace(plan, has_triton=False)
    elif plan is ATTENTION:  # nor does the rotary kernel: test this part only
        plan = replace(plan, joined=False)
    family_of(model.config).fuse(model, plan)
    assert_same(found(model), expected)


PROJECTIONS = [("qwen3", "q_proj"), ("qwen3", "v_proj"), ("llama", "k_proj")]


@pytest.mark.parametrize(
    ("family", "name", "how"),
    [
        *((*case, how) for case in PROJECTIONS for how in ("class", "hook", "forward")),
        ("qwen3", "q_norm", "class"),
    ],
)
def test_attention_of_decoders_steps_aside(family, name, how):
    model = plain(family)
    change_all(model.base_model, name, how)
    assert joined_blocks.fuse_decoder(model) == 0


def test_attention_of_modernbert_steps_aside():
    model = built("modernbert", "sequence-classification", "sdpa")
    changed(model.base_model.layers[0].attn, "class")
    assert joined_blocks.fuse_encoder(model) == 1


VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
VIT |= {"intermediate_size": 32, "image_size": 8, "patch_size": 4, "num_channels": 3}


@pytest.mark.parametrize("how", ["class", "hook", "forward"])
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "fc1", "activation_fn"])
def test_layers_of_a_vision_transformer_are_never_bypassed(name, how):
    torch.manual_seed(0)
    config = ViTConfig(**VIT, image_mean=[0.0] * 3, image_std=[1.0] * 3)
    model = no_dropout(ViT(config))
    change_all(model.base_model, name, how)
    pixels = torch.randn(3, 3, 8, 8)

    def answer():
        model.zero_grad()
        logits = model(pixel_values=pixels).logits
        logits.square().sum().backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters()}
        return logits.detach(), found

    expected = answer()
    family_of(config).fuse(model, PLAN)
    last = type(model.base_model.layers[-1]) is FirstTokenLayer
    assert last == (name not in ("k_proj", "v_proj"))
    assert_same(answer(), expected)


@pytest.mark.parametrize("how", [None, "class", "hook", "forward"])
def test_the_head_of_a_language_model_is_called_once_it_is_changed(how, monkeypatch):
    monkeypatch.setattr(assemble, "has_triton", lambda: True)
    whole = task_model("qwen3", "causal-lm", "sdpa")
    if how:
        changed(whole.model.lm_head, how)
    fused = assemble._fused_head(whole, SimpleNamespace(is_cuda=True))
    assert fused == (how is None)


class OwnLoss(CausalLM):
    """A loss that is doubled."""

    def loss(self, logits, labels):
        return 2 * super().loss(logits, labels)


def test_a_loss_of_ones_own_is_called_and_no_kernel_in_its_place(monkeypatch):
    monkeypatch.setattr(assemble, "has_triton", lambda: True)
    whole = task_model("qwen3", "causal-lm", "sdpa")
    gpu = SimpleNamespace(is_cuda=True)
    assert assemble._fused_head(whole, gpu)
    whole.task = OwnLoss(whole.task.settings, vocabulary=whole.task.vocabulary)
    assert not assemble._fused_head(whole, gpu)
    both = BidirectionalLM(whole.task.settings)
    assert both.is_plain


@pytest.mark.parametrize(
    ("family", "place"),
    [
        ("bert", "encoder.layer.1"),
        ("bert", "encoder.layer.1.attention"),
        ("modernbert", "layers.1"),
        ("modernbert", "layers.1.attn"),
    ],
)
def test_a_last_layer_of_another_class_is_given_all_places(family, place):
    task = "sequence-classification"
    model = built(family, task)
    changed(model.base_model.get_submodule(place), "class")
    assert not TaskModel(model, task_of(task), 24).narrow_points
    assert TaskModel(built(family, task), task_of(task), 24).narrow_points


class OwnBert(BertForSequenceClassification):
    """A repository's code with a model type that flatout knows. It doubles the
    logits."""

    def forward(self, *inputs, **named):
        found = super().forward(*inputs, **named)
        found.logits = 2 * found.logits
        return found


def test_a_model_of_own_code_runs_as_it_is():
    model = built("bert", "sequence-classification")
    model.__class__ = OwnBert
    note_own_code(model)
    task, ids = task_of("sequence-classification"), torch.tensor([[1, 7, 9, 2]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    whole = TaskModel(model, task, 24)
    found = whole.logits(batch | {"target_index": torch.tensor([0])})
    torch.testing.assert_close(found, model(input_ids=ids).logits)
    family, cpu = whole.family, ("cpu", torch.float32)
    assert "the model has custom code" in family.packing_fault(model.config, *cpu)


def test_models_of_transformers_have_no_note():
    for family in ("bert", "qwen3", "log_key_lstm"):
        task = "sequence-classification" if family == "bert" else "causal-lm"
        model = built(family, task)
        note_own_code(model)
        assert not hasattr(model.config, OWN_CODE)
