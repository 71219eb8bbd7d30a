"""Attention of long rows: which kernel takes which, and what is made of their results.

The library's kernels run on a GPU alone (test_gpu.py has them). Here plain PyTorch
stands in for each, with shapes and layouts of its operator's schema.
"""

import logging
import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import Library

from flatout.engine.ops import long_attention as module
from flatout.engine.ops.attention import FLASH4
from flatout.engine.ops.kernels import flash4
from flatout.engine.ops.long_attention import long_attention
from flatout.engine.ops.row_by_row import Rule, row_by_row
from tests.engine.families import task_model

HEADS, GROUPS, DIM = 4, 2, 8
CASES = {
    "all full": ([6, 6, 6], 3),
    "two in front": ([6, 6, 2, 5, 0, 0], 2),
    "none": ([5, 2, 4], 0),
    "one that is not said": ([6, 3], 0),
}


def scores(q, k, causal, scale):
    """(..., H, T, D), (..., G, S, D) -> keys for all heads, (..., H, T, S)."""
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    found = scale * q @ k.mT
    if causal:
        hidden = torch.ones(found.shape[-2:], dtype=torch.bool).triu(1)
        found = found.masked_fill(hidden, float("-inf"))
    return k, found


def attended(q, k, v, causal, scale):
    _, found = scores(q, k, causal, scale)
    v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    return found.softmax(-1) @ v, found.logsumexp(-1)


def gradients(grad, q, k, v, out, lse, causal, scale):
    """By the forward pass's log-sum-exp, as all flash kernels do it."""
    shared = q.shape[-3] // k.shape[-3]
    keys, found = scores(q, k, causal, scale)
    weights = (found - lse[..., None]).exp()
    values = v.repeat_interleave(shared, -3)
    along = (grad * out).sum(-1, keepdim=True)
    slope = scale * weights * (grad @ values.mT - along)

    def summed(each):
        parts = each.unflatten(-3, (k.shape[-3], shared))
        return parts.sum(-3)

    return slope @ keys, summed(slope.mT @ q), summed(weights.mT @ grad)


class Kernels:
    """Of kernels that say what was asked of them."""

    def __init__(self, sums_dims=4, refuses=""):
        self.calls, self.sums_dims, self.refuses = [], sums_dims, refuses

    def called(self, name, tokens):
        self.calls.append((name, tokens))
        if name == self.refuses:
            raise RuntimeError("No valid execution plans built.\nmore")

    def cudnn(self, q, k, v, bias, keeps, p=0.0, causal=False, mask=False, scale=None):
        self.called("cudnn", q.shape[0] * q.shape[2])
        out, lse = attended(q, k, v, causal, scale)
        laid = out.transpose(1, 2).contiguous().transpose(1, 2)
        none = torch.zeros((), dtype=torch.int64)
        lse = lse[..., None] if self.sums_dims == 4 else lse
        return laid, lse, None, None, q.shape[2], q.shape[2], none, none, None

    def cudnn_backward(
        self, grad, q, k, v, out, lse, seed, offset, bias, bq, bk, most, most_k, p,
        causal, scale=None,
    ):  # fmt: skip
        self.called("cudnn backward", q.shape[0] * q.shape[2])
        assert lse.dim() == self.sums_dims
        assert lse.is_contiguous()
        assert lse.shape[:3] == q.shape[:3]
        lse = lse.view(q.shape[:3])
        return gradients(grad, q, k, v, out, lse, causal, scale)

    def flash(
        self, q, k, v, bounds, bounds_k, most, most_k, p, causal, mask, scale=None,
        **sides,
    ):  # fmt: skip
        self.called("flash", len(q))
        state = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
        return *of_rows(q, k, v, bounds, causal, scale), *state, torch.empty(0)

    def flash_backward(
        self, grad, q, k, v, out, lse, bounds, bounds_k, most, most_k, p, causal,
        state, unused, scale=None, **sides,
    ):  # fmt: skip
        self.called("flash backward", len(q))
        return gradients_of_rows(grad, q, k, v, out, lse, bounds, causal, scale)


def of_rows(q, k, v, bounds, causal, scale):
    """(P, H, D), (H, P)."""
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], len(q))
    for own in rows(bounds, len(q)):
        parts = [t[own].transpose(0, 1) for t in (q, k, v)]
        found, lse[:, own] = attended(*parts, causal, scale)
        out[own] = found.transpose(0, 1)
    return out, lse


def gradients_of_rows(grad, q, k, v, out, lse, bounds, causal, scale):
    results = [torch.zeros_like(t) for t in (q, k, v)]
    for own in rows(bounds, len(q)):
        given = [t[own].transpose(0, 1) for t in (grad, q, k, v, out)]
        found = gradients(*given, lse[:, own], causal, scale)
        for result, part in zip(results, found, strict=True):
            result[own] = part.transpose(0, 1)
    return tuple(results)


def rows(bounds, tokens):
    assert (bounds[0], bounds[-1]) == (0, tokens)
    return [slice(a, b) for a, b in pairwise(bounds)]


class Flash4(ModuleType):
    """flash_attn.cute.interface of version 4.0.0b36."""

    tokens: list[int]

    def _flash_attn_fwd(
        self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        softmax_scale, causal, window_size_left, window_size_right, return_lse,
    ):  # fmt: skip
        assert return_lse
        assert (window_size_left, window_size_right) == (None, None)
        assert (max_seqlen_q, cu_seqlens_q) == (max_seqlen_k, cu_seqlens_k)
        self.tokens.append(len(q))
        found = of_rows(q, k, v, cu_seqlens_q, causal, softmax_scale)
        return *found, None, None, None

    def _flash_attn_bwd(
        self, q, k, v, out, dout, lse, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, softmax_scale, causal, window_size_left, window_size_right,
        dq, dk, dv,
    ):  # fmt: skip
        self.tokens.append(len(dout))
        given = (dout, q, k, v, out, lse, cu_seqlens_q, causal, softmax_scale)
        results = dq, dk, dv
        for result, part in zip(results, gradients_of_rows(*given), strict=True):
            result.copy_(part)
        return results


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr(module._Cudnn, "refused", False)
    made = []

    def put(**options):
        mine, library = Kernels(**options), Library("aten", "IMPL", "CPU")
        made.append(library)
        name = "_scaled_dot_product_cudnn_attention"
        library.impl(name, mine.cudnn)
        library.impl(f"{name}_backward", mine.cudnn_backward)
        library.impl("_flash_attention_forward", mine.flash)
        library.impl("_flash_attention_backward", mine.flash_backward)
        return mine

    yield put
    for library in made:
        library._destroy()


def both(lengths, full, rule, flash4=False):
    """Ours and plain PyTorch's, with their gradients."""
    qkv, bounds, mark = given(lengths, full)
    got = long_attention(qkv, HEADS, bounds, mark, 6, *rule, flash4)[0]
    want = row_by_row(*qkv.split([HEADS, GROUPS, GROUPS], 1), bounds, rule)
    grad = torch.randn_like(want)
    grads = [torch.autograd.grad(out, qkv, grad)[0] for out in (got, want)]
    return (got, grads[0]), (want, grads[1])


def given(lengths, full):
    torch.manual_seed(0)
    shape = (sum(lengths), HEADS + 2 * GROUPS, DIM)
    qkv = torch.randn(shape, requires_grad=True)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return qkv, bounds, torch.empty(full + 2, dtype=torch.uint8)


def check(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sums_dims", [3, 4])
@pytest.mark.parametrize("case", CASES)
def test_full_rows_in_front_go_to_cudnn_and_the_others_to_flash(
    kernels, case, sums_dims, causal
):
    library, (lengths, full) = kernels(sums_dims=sums_dims), CASES[case]
    check(*both(lengths, full, Rule(0.3, 0.0, causal, -1, 0 if causal else -1)))
    front, rest = 6 * full, sum(lengths) - 6 * full
    asked = {"cudnn": front, "flash": rest}
    asked |= {f"{name} backward": tokens for name, tokens in asked.items()}
    assert dict(library.calls) == {n: tokens for n, tokens in asked.items() if tokens}


def test_one_compiled_graph_serves_all_numbers_of_full_rows(kernels):
    library, numbers = kernels(), []

    def attend(qkv, bounds, mark):
        rule = Rule(0.3, 0.0, True, -1, 0)
        return 2 * long_attention(qkv, HEADS, bounds, mark, 6, *rule, False)[0]

    torch._dynamo.reset()
    counted = CompileCounterWithBackend("aot_eager")
    together = torch.compile(attend, dynamic=True, backend=counted)
    for lengths, full in [
        ([6, 6, 5, 1], 2),
        ([6, 6, 6], 3),
        ([4, 5, 2], 0),
        ([6, 1], 1),
    ]:
        qkv, *rest = given(lengths, full)
        grads = []
        for way in (together, attend):
            out = way(qkv, *rest)
            grads.append((out, *torch.autograd.grad(out.square().sum(), qkv)))
        check(*grads)
        numbers.append(dict(library.calls).get("cudnn", 0))
        library.calls.clear()
    assert numbers == [12, 18, 0, 6]
    assert counted.frame_count == 1


@pytest.mark.parametrize("refuses", ["cudnn", "cudnn backward"])
def test_where_cudnn_refuses_flash_takes_all_rows(kernels, caplog, refuses):
    """At once, and from then on; one line says so."""
    library = kernels(refuses=refuses)
    rule, (lengths, full) = Rule(0.3, 0.0, True, -1, 0), CASES["two in front"]
    with caplog.at_level(logging.WARNING):
        check(*both(lengths, full, rule))
        library.calls.clear()
        check(*both(lengths, full, rule))
    assert dict(library.calls) == {"flash": 19, "flash backward": 19}
    (line,) = caplog.messages
    assert "refuses full rows (No valid execution plans built.)" in line


def test_dropout_windows_and_determinism_stay_with_flash(kernels):
    library = kernels()
    for rule, fixed in [
        (Rule(0.3, 0.1, True, -1, 0), False),
        (Rule(0.3, 0.0, True, 300, 0), False),
        (Rule(0.3, 0.0, True, -1, 0), True),
    ]:
        torch.use_deterministic_algorithms(fixed)
        try:
            both([6, 6], 2, rule)
        finally:
            torch.use_deterministic_algorithms(mode=False)
    assert {name for name, _ in library.calls} == {"flash", "flash backward"}


@pytest.fixture
def package(monkeypatch):
    found = Flash4("flash_attn.cute.interface")
    found.tokens = []
    flash4._package.cache_clear()
    monkeypatch.setitem(sys.modules, found.__name__, found)
    yield found
    flash4._package.cache_clear()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_flash_attention_4_takes_all_rows(package, case, causal):
    lengths, full = CASES[case]
    rule = Rule(0.3, 0.0, causal, -1, 0 if causal else -1)
    check(*both(lengths, full, rule, flash4=True))
    assert package.tokens == [sum(lengths)] * 2  # forward and backward


GPU = torch.device("cuda")


def config(**given):
    return SimpleNamespace(hidden_size=128, num_attention_heads=4, **given)


def test_flash_attention_4_says_why_it_is_not_taken(monkeypatch, package):
    monkeypatch.setattr(flash4, "_is_made_for", lambda device: True)
    monkeypatch.setattr(flash4, "row_tiles_fit", lambda config: config.fits)
    fits = config(fits=True, attention_dropout=0.0)
    assert flash4.fault(fits, GPU) is None
    assert "made for NVIDIA's Hopper" in flash4.fault(fits, torch.device("cpu"))
    dropout = config(fits=True, attn_pdrop=0.1)
    assert "the model's attn_pdrop is not 0" in flash4.fault(dropout, GPU)
    assert "head dimension 32 has no" in flash4.fault(config(fits=False), GPU)
    torch.use_deterministic_algorithms(mode=True)
    try:
        assert "runtime.deterministic" in flash4.fault(fits, GPU)
    finally:
        torch.use_deterministic_algorithms(mode=False)
    monkeypatch.delattr(Flash4, "_flash_attn_bwd")
    assert "flash-attn-4 has other functions: pip" in flash4.fault(fits, GPU)
    flash4._package.cache_clear()
    monkeypatch.setitem(sys.modules, package.__name__, None)
    assert "flash-attn-4 cannot be imported" in flash4.fault(fits, GPU)


@pytest.mark.parametrize("family", ["qwen3", "modernbert", "gpt2"])
def test_models_take_its_name_as_one_that_needs_no_package(family):
    """transformers asks for packages where a name says flash."""
    model = task_model(family, "sequence-classification", FLASH4).model
    assert model.config._attn_implementation == FLASH4
    model.set_attn_implementation("sdpa")
    model.set_attn_implementation(FLASH4)
