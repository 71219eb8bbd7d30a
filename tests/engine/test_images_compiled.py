"""Parts of an image model that are replaced in a compiled step."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from flatout.engine.batches.collation import Collator
from flatout.engine.families import FusePlan
from flatout.engine.families._modeling.crops import gathered, sampled
from flatout.engine.families._modeling.vit_blocks import FirstTokenLayer
from flatout.engine.models import compilation
from flatout.engine.models.compilation import OneShape, compiled
from flatout.engine.models.model import TaskModel
from flatout.engine.ops.attention import PADDED
from flatout.engine.ops.dropout import Noise
from flatout.engine.ops.folded_convolution import fold
from flatout.engine.ops.patches import PatchProduct, replace_patches
from flatout.engine.rows.layout import Layout
from flatout.engine.train.setup.assemble import build_model
from tests.engine.test_images import CONVNEXT, RESNET, VIT, job_of

CPU = torch.device("cpu")
PLAN = FusePlan(Noise(CPU), *[False] * 3)
SHALLOW = VIT | {"num_hidden_layers": 1}
"""Sizes of a shallow model, which takes half the time to trace."""


def test_crops_by_index_are_those_of_the_kernel(tmp_path):
    """The tolerance is a five-thousandth of the range of a byte."""
    job = job_of(tmp_path, crop_area=0.3)
    pixels = torch.randint(0, 256, (64, 24, 24, 3), dtype=torch.uint8)
    ids = np.arange(64)
    crops = torch.from_numpy(job.task._crops(ids, 2))
    assert 0 < crops[:, 4].mean() < 1
    found, wanted = gathered(pixels, crops), sampled(pixels, crops)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.05)


def task_model(folder, config):
    job = job_of(folder, config, crop_area=0.5)
    torch.manual_seed(1)
    return job, TaskModel(build_model(job), job.task, 1)


def batch_of(job, rows=12):
    return Collator(job.task, Layout()).collate(job.train, np.arange(rows), 1)


def gradients(model, batch, run=None):
    """Return logits, and gradients by parameter. `run` is the compiled `model`."""
    model.zero_grad()
    loss, logits = (run or model)(batch)
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return logits, copy.deepcopy(found)


def assert_same(found, wanted):
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-3, atol=1e-4)


def assert_two_steps_alike(plain, model, fast, batch):
    """Compare logits, gradients and BatchNorm's running statistics. `fast` runs
    `model`."""
    for _ in range(2):
        assert_same(gradients(model, batch, fast), gradients(plain, batch))
    kept, buffers = dict(model.named_buffers()), dict(plain.named_buffers())
    torch.testing.assert_close(kept, buffers, rtol=1e-4, atol=1e-5)


def type_of(config):
    return config["model_type"]


@pytest.mark.parametrize("config", [VIT, CONVNEXT, RESNET], ids=type_of)
def test_fused_parts_change_neither_logits_nor_gradients(tmp_path, config):
    job, model = task_model(tmp_path, config)
    batch = batch_of(job)
    wanted, names = gradients(model, batch), list(model.state_dict())
    model.family.fuse(model.model, PLAN)
    assert list(model.state_dict()) == names
    assert_same(gradients(model, batch), wanted)
    patches = [m for m in model.modules() if isinstance(m, PatchProduct)]
    assert len(patches) == {"vit": 1, "convnext": 2, "resnet": 0}[config["model_type"]]


def test_only_convolutions_without_overlap_become_products():
    options = [
        {"kernel_size": 4, "stride": 4},
        {"kernel_size": (2, 3), "stride": (2, 3)},
        {"kernel_size": 1, "stride": 1},
        {"kernel_size": 3, "stride": 2},
        {"kernel_size": 2, "stride": 2, "padding": 1},
        {"kernel_size": 2, "stride": 2, "groups": 3},
    ]
    layers = [nn.Conv2d(3, 6, **chosen) for chosen in options]
    pixels = torch.randn(2, 3, 13, 14)
    wanted = [layer(pixels) for layer in layers]
    assert replace_patches(nn.ModuleList(layers)) == 2
    for layer, result in zip(layers, wanted, strict=True):
        torch.testing.assert_close(layer(pixels), result)


@pytest.mark.parametrize("size", [(20, 14), (21, 14)], ids=["even", "odd"])
def test_a_folded_convolution_has_the_plain_result_and_gradient(size):
    plain = nn.Conv2d(3, 6, 7, stride=2, padding=3)
    layer = copy.deepcopy(plain)
    assert fold(layer)
    pixels = torch.randn(2, 3, *size)
    found = torch.compile(layer, backend="eager")(pixels)
    wanted = plain(pixels)
    torch.testing.assert_close(found, wanted)
    scale = torch.randn_like(wanted)
    (found * scale).sum().backward()
    (wanted * scale).sum().backward()
    for own, other in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-5)


def test_only_strided_convolutions_on_few_channels_are_folded():
    usual = {"kernel_size": 7, "stride": 2, "padding": 3}
    others = [{"kernel_size": 5}, {"stride": 1}, {"padding": 2}, {"dilation": 2}]
    layers = [nn.Conv2d(3, 6, **usual | other) for other in others]
    assert not any(map(fold, [*layers, nn.Conv2d(8, 6, **usual)]))


def test_the_last_layer_computes_one_token(tmp_path):
    job, model = task_model(tmp_path, VIT)
    model.family.fuse(model.model, PLAN)
    shapes = []
    last = model.model.base_model.layers[-1]
    assert isinstance(last, FirstTokenLayer)
    last.mlp.register_forward_hook(lambda *a: shapes.append(a[2].shape))
    model(batch_of(job))
    assert shapes == [(12, 1, 16)]


class Backend:
    """Counts graphs, and runs them without changes."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph.forward


SLOW = [pytest.param(c, marks=pytest.mark.slow) for c in (RESNET, CONVNEXT)]


@pytest.mark.parametrize("config", [SHALLOW, *SLOW], ids=type_of)
def test_a_step_is_one_graph_of_its_shape(tmp_path, config):
    """The graph contains crops, model and loss. The last batch of an epoch needs no
    second graph."""
    job, model = task_model(tmp_path, config)
    full, rest = batch_of(job), batch_of(job, 5)
    wanted = gradients(model, full)
    backend = Backend()
    fast = compiled(model, backend=backend)
    assert isinstance(fast, OneShape)
    for batch in (full, full, rest, full):
        fast(batch)
    assert len(backend.graphs) == 1
    assert_same(gradients(model, full, fast), wanted)
    fast(rest), fast(rest)  # micro-batches that have become smaller permanently
    assert len(backend.graphs) == 2


@pytest.mark.slow
@pytest.mark.parametrize("config", [VIT, RESNET], ids=type_of)
def test_a_compiled_step_with_fused_parts_is_the_plain_one(tmp_path, config):
    job, plain = task_model(tmp_path, config)
    model, batch = copy.deepcopy(plain), batch_of(job)
    model.family.fuse(model.model, PLAN)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert_two_steps_alike(plain, model, compiled(model, backend="aot_eager"), batch)


def test_no_mask_is_made_in_a_graph(tmp_path):
    """Even a mask that hides nothing would keep PyTorch from using its fast kernels."""
    job, model = task_model(tmp_path, SHALLOW)
    model.model.set_attn_implementation(PADDED)
    backend = Backend()
    compiled(model, backend=backend)(batch_of(job))
    found = [
        node.kwargs.get("attn_mask")
        for node in backend.graphs[0].graph.nodes
        if "scaled_dot_product_attention" in str(node.target)
    ]
    assert found == [None]


class Total(nn.Module):
    def forward(self, batch):
        return batch["values"].sum()


def test_nothing_is_compiled_while_a_graph_is_recorded(monkeypatch):
    backend, rest = Backend(), {"values": torch.ones(5)}
    fast = OneShape(Total(), backend)
    fast({"values": torch.ones(12)})
    monkeypatch.setattr(compilation, "_is_recorded", lambda: True)
    fast(rest), fast(rest)
    assert len(backend.graphs) == 1
