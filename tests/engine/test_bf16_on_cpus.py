"""bf16 on CPUs with and without bf16 instructions: few shapes, and rows in fp32."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig

from flatout.engine.machine.runtime import CPU_BF16_PAD_MULTIPLE, set_up
from flatout.engine.ops.attention import PACKED, packed_attention
from flatout.engine.ops.row_by_row import Rule, row_by_row
from flatout.engine.parameters import RuntimeSettings
from flatout.engine.train.loop import train
from flatout.engine.train.setup.resolved_config import resolve
from flatout.engine.train.setup.step_data import step_rows as training_rows
from tests.engine.families import CONFIGS, gradient, step_rows, task_model
from tests.engine.plain import job_for, save_start
from tests.engine.runs import CPU, make_job

BF16 = replace(CPU, precision="bf16")
HIDDEN = BertConfig(hidden_size=16, num_attention_heads=2)


@pytest.mark.parametrize(
    ("amx", "avx512", "precision"),
    [
        (False, False, "fp32"),
        (True, False, "bf16"),
        (False, True, "bf16"),
    ],
)
def test_auto_is_bf16_where_a_cpu_has_instructions_for_it(
    monkeypatch, amx, avx512, precision
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    assert set_up(RuntimeSettings(threads=1)).precision == precision
    for asked in ("fp32", "bf16"):
        settings = RuntimeSettings(threads=1, precision=asked)
        assert set_up(settings).precision == asked


@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_attention_are_computed_in_fp32(causal):
    """There are four query heads, two key and value heads, and rows of 3, 1 and 5
    tokens."""
    torch.manual_seed(0)
    module = nn.Module()
    module.is_causal = causal
    q, k, v = (torch.randn(1, heads, 9, 8).bfloat16() for heads in (4, 2, 2))
    bounds = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    with BF16.autocast():
        found, _ = packed_attention(module, q, k, v, None, cu_seqlens=bounds)
    assert found.dtype == torch.bfloat16
    rule = Rule(8**-0.5, 0.0, causal, -1, 0 if causal else -1)
    rows = [t.squeeze(0).transpose(0, 1) for t in (q, k, v)]
    exact = row_by_row(*(t.float() for t in rows), bounds, rule)
    assert torch.equal(found[0], exact.bfloat16())
    assert not torch.equal(found[0], row_by_row(*rows, bounds, rule))


@pytest.mark.parametrize(
    ("family", "task"),
    [
        ("bert", "sequence-classification"),
        ("bert", "masked-lm"),
        ("qwen3", "causal-lm"),
    ],
)
def test_a_packed_step_in_bf16_is_that_of_fp32_within_rounding(family, task):
    plain = task_model(family, task, PACKED)
    loss, grads = gradient(plain, [step_rows(family, task, "packed")[0]])
    model = task_model(family, task, PACKED)
    model.forward = BF16.autocast()(model.forward)
    batch = step_rows(family, task, "packed", pad_multiple=CPU_BF16_PAD_MULTIPLE)[0]
    rounded_loss, rounded = gradient(model, [batch])
    assert rounded_loss != loss
    assert rounded_loss == pytest.approx(loss, rel=2**-8)
    assert (rounded - grads).norm() < 0.02 * grads.norm()


def micro_batches(folder, runtime, strategy):
    """Return the micro-batches of 12 steps of 16 rows with 3 to 24 tokens, 120 tokens
    at most in each."""
    job = make_job(folder, batching=strategy)
    resolved = resolve(job, runtime, HIDDEN)
    data = training_rows(job, runtime, resolved, HIDDEN)
    for step in range(12):
        batch = data[step]
        shapes = [micro["input_ids"].shape for micro in batch.micro_batches]
        assert batch.num_padded_tokens == sum(shape.numel() for shape in shapes)
        yield batch, shapes


def test_packed_totals_are_rounded_up_in_bf16_alone(tmp_path):
    assert CPU_BF16_PAD_MULTIPLE == 64
    for batch, shapes in micro_batches(tmp_path, BF16, "packed"):
        assert {total for _, total in shapes} <= {64, 128}
        assert batch.num_tokens < batch.num_padded_tokens
    for batch, _ in micro_batches(tmp_path, CPU, "packed"):
        assert batch.num_tokens == batch.num_padded_tokens


def test_padded_lengths_are_rounded_up_in_bf16_alone(tmp_path):
    lengths = {
        runtime.precision: [
            length
            for _, shapes in micro_batches(tmp_path, runtime, "grouped")
            for _, length in shapes
        ]
        for runtime in (BF16, CPU)
    }
    assert set(lengths["bf16"]) == {8, 16, 24}
    assert any(length % 8 for length in lengths["fp32"])
    assert lengths["bf16"] == [-(-length // 8) * 8 for length in lengths["fp32"]]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_regression_is_not_rounded_at_the_end(family, whole):
    """The values are around 2,000, where adjacent bf16 numbers differ by 8."""
    model = task_model(family, "regression", "sdpa", whole=whole).eval()
    output = [m for m in model.modules() if getattr(m, "out_features", 0) == 1][-1]
    if output.bias is None:
        output.bias = nn.Parameter(torch.zeros(1))
    output.bias.data.fill_(2000.0)
    batch = step_rows(family, "regression", "random").cut(np.arange(8), 0, 0)
    inputs = batch.micro_batches[0]
    with torch.no_grad():
        exact = model.logits(inputs)
        with BF16.autocast():
            found = model.logits(inputs)
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() < 0.1
    assert (found != 2000.0).all()


@pytest.mark.parametrize("task", ["next-key", "bidirectional-lm"])
def test_lstms_in_bf16_train_with_fp32_inside(tmp_path, task):
    start = save_start(tmp_path / "start", task)
    job = job_for(tmp_path, task, start, max_steps=1)
    assert train(job, BF16).report.steps == 1
