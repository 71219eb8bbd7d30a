"""Compare Triton kernels with plain PyTorch. This is a separate program, because Triton
decides when it is imported whether to interpret kernels."""

import itertools
import sys
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.nn import functional as F

from flatout.engine.families.decoders import Llama
from flatout.engine.models.compilation import compiled
from flatout.engine.ops.attention import PACKED, ROWS
from flatout.engine.ops.blocks import fuse_blocks
from flatout.engine.ops.dropout import Noise, replace_dropout
from flatout.engine.ops.joined_blocks import fuse_decoder, fuse_encoder, fuse_gates
from flatout.engine.ops.kernels.linear_loss import linear_cross_entropy
from flatout.engine.ops.kernels.rotary import rotary
from flatout.engine.ops.kernels.row_attention.forward import row_attention
from flatout.engine.ops.row_by_row import Rule, row_by_row
from tests.engine.families import CONFIGS, task_model

device = "cuda" if torch.cuda.is_available() else "cpu"
IDS = torch.tensor([[1, 7, 9, 55, 2], [1, 80, 6, 14, 2]], device=device)
BOUNDS = torch.tensor([0, 5, 95, 96, 160, 225, 225], dtype=torch.int32, device=device)


def check_row_attention():
    for heads, groups, causal, window in [
        (2, 2, False, (-1, -1)),
        (4, 2, True, (-1, 0)),
        (16, 8, True, (-1, 0)),  # two heads per program
        (32, 4, True, (-1, 0)),  # four of the eight heads that share a key
        (2, 2, False, (8, 8)),
    ]:
        qkv = [
            torch.randn(225, n, 16, device=device, requires_grad=True)
            for n in (heads, groups, groups)
        ]
        grad = torch.randn(225, heads, 16, device=device)
        want = row_by_row(*qkv, BOUNDS, Rule(0.25, 0.0, causal, *window))
        joined = torch.cat(qkv, 1)
        got = row_attention(joined, heads, BOUNDS, 90, 0.25, 0.0, causal, *window)[0]
        mine, plain = (
            (out, *torch.autograd.grad(out, qkv, grad)) for out in (got, want)
        )
        torch.testing.assert_close(mine, plain, rtol=2e-2, atol=2e-2)


def check_windows(section):
    """Check rows longer than the keys that a tile's queries see, and longer than a
    section."""
    with patch("flatout.engine.ops.kernels.row_attention.backward.SECTION", section):
        check_rows_with_windows()


def check_rows_with_windows():
    bounds = torch.tensor([0, 5, 305, 306, 700, 700], dtype=torch.int32, device=device)
    for heads, groups, causal, window in [
        (2, 2, False, (64, 64)),
        (2, 2, False, (65, 63)),
        (4, 2, True, (70, 0)),
        (16, 8, True, (40, 0)),
    ]:
        joined = torch.randn(700, heads + 2 * groups, 16, device=device)
        joined.requires_grad_()
        grad = torch.randn(700, heads, 16, device=device)
        rule = Rule(0.25, 0.0, causal, *window)
        want = row_by_row(*joined.split([heads, groups, groups], 1), bounds, rule)
        got = row_attention(joined, heads, bounds, 400, *rule)[0]
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
        one, other = (torch.autograd.grad(o, joined, grad)[0] for o in (got, want))
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def check_attention_dropout():
    """Check that both passes drop the same values, and that the right fraction is
    dropped."""
    qkv = torch.randn(225, 6, 16, device=device)

    def out(q, value):
        torch.manual_seed(5)
        joined = torch.cat([q, qkv[:, 2:4], value], 1)
        return row_attention(joined, 2, BOUNDS, 90, 0.25, 0.3, False, -1, -1)[0]

    def loss(q):
        return out(q, qkv[:, 4:]).double().square().sum()

    q = qkv[:, :2].clone().requires_grad_()
    slope = torch.autograd.grad(loss(q), q)[0].double()
    way = slope / slope.square().mean().sqrt()  # along it, the change is not near zero
    ahead, behind = (q.detach() + sign * 1e-2 * way.float() for sign in (1, -1))
    measured = (loss(ahead) - loss(behind)) / 2e-2
    # On a GPU, the products are in TF32, and the quotient magnifies the rounding error.
    torch.testing.assert_close(
        measured.detach(), (slope * way).sum(), rtol=5e-2, atol=1e-2
    )
    # With values of one, the outputs are sums of the remaining weights: one on average.
    ones = torch.ones(225, 2, 16, device=device)
    left = out(torch.zeros(225, 2, 16, device=device), ones)[:, :, 0]
    long_rows = torch.cat([left[5:95], left[96:225]])
    assert abs(float(long_rows.mean()) - 1) < 0.01, float(long_rows.mean())
    assert 0.03 < float(long_rows.std()) < 0.12, float(long_rows.std())


def check_compiled_attention():
    """Check that the kernel can be compiled. Two query heads share a key's gradient."""
    joined = torch.randn(225, 8, 16, device=device, requires_grad=True)
    grad = torch.randn(225, 4, 16, device=device)

    def attend(joined):
        return row_attention(joined, 4, BOUNDS, 90, 0.25, 0.0, True, -1, 0)[0]

    backend = "inductor" if device == "cuda" else "aot_eager"
    found = torch.compile(attend, dynamic=True, backend=backend)(joined)
    want = attend(joined)
    torch.testing.assert_close(found, want)
    one, other = (torch.autograd.grad(out, joined, grad)[0] for out in (found, want))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def check_linear_loss():
    hidden = torch.randn(40, 8, device=device, requires_grad=True)
    weight = torch.randn(5000, 8, device=device, requires_grad=True)
    labels = torch.randint(0, 5000, (40,), device=device)
    labels[3] = -100
    ours = linear_cross_entropy(hidden, weight, labels)[0]
    plain = F.cross_entropy(hidden @ weight.t(), labels, reduction="sum")
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-3)
    inputs = hidden, weight
    one, other = (torch.autograd.grad(loss * 0.5, inputs) for loss in (ours, plain))
    torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    frozen = linear_cross_entropy(hidden, weight.detach(), labels, False)
    assert frozen[2].shape == (0, 8)
    one, other = (
        torch.autograd.grad(loss, hidden)[0]
        for loss in (frozen[0], linear_cross_entropy(hidden, weight, labels)[0])
    )
    torch.testing.assert_close(one, other)


def check_rotary():
    """Check query, key and value in one tensor, with and without norms."""
    cos, sin = (turn.repeat(1, 2) for turn in angles(70, 8))
    for norms in (True, False):
        product = torch.randn(70, 10, 16, device=device, requires_grad=True)
        weights = torch.randn(2, 16, device=device, requires_grad=True)
        grad = torch.randn(70, 10, 16, device=device)
        given = list(weights) if norms else [None, None]
        got = rotary(product, cos, sin, *given, 4, 1e-5)
        want = turned_plainly(product, cos, sin, given, 4)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        inputs = (product, weights) if norms else (product,)
        one, other = (torch.autograd.grad(out, inputs, grad) for out in (got, want))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def angles(tokens, half):
    angle = torch.randn(tokens, half, device=device)
    return angle.cos(), angle.sin()


def turned_plainly(product, cos, sin, weights, heads):
    """Return the result of transformers' rotary embedding, computed part by part."""
    query, key, value = product.split([heads, 3, 3], 1)
    parts = []
    for part, weight in zip((query, key), weights, strict=True):
        normed = part
        if weight is not None:
            square = part.square().mean(-1, keepdim=True)
            normed = weight * (part * torch.rsqrt(square + 1e-5))
        first, second = normed.chunk(2, -1)
        half = torch.cat([-second, first], -1)
        parts.append(normed * cos[:, None] + half * sin[:, None])
    return torch.cat([*parts, value], 1)


def check_encoder():
    """Check both kinds of layers of ModernBERT, in the same way as decoders."""
    plain = PACKED if device == "cpu" else ROWS
    hidden, want = encoder_gradients(plain, fused=False)
    mine, found = encoder_gradients(ROWS, fused=True)
    assert found.keys() == want.keys()
    for one, other in [(mine, hidden), *((found[n], want[n]) for n in want)]:
        error = (one - other).norm() / other.norm()
        assert error < 1e-2, error


def encoder_gradients(implementation, *, fused):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    with patch.dict(CONFIGS, {"modernbert": CONFIGS["modernbert"] | sizes}):
        task = "sequence-classification"
        model = task_model("modernbert", task, implementation, whole=True).model
    model.to(device).train()
    if fused:
        assert fuse_encoder(model) == 3
    return packed_gradients(model)


def check_decoders():
    """Check packed rows in a whole model against rows computed one by one."""
    for family in sorted(Llama.model_types):
        hidden, want = decoder_gradients(family, PACKED if device == "cpu" else ROWS)
        for compile_blocks in (False, True)[: 1 + (family == "qwen3")]:
            mine, found = decoder_gradients(family, ROWS, True, compile_blocks)
            assert found.keys() == want.keys()
            for one, other in [(mine, hidden), *((found[n], want[n]) for n in want)]:
                error = (one - other).norm() / other.norm()
                assert error < 1e-2, (family, compile_blocks, error)  # TF32 on a GPU


def decoder_gradients(family, implementation, fused=False, compile_blocks=False):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape = {**CONFIGS[family], **sizes, "head_dim": 32}
    with patch.dict(CONFIGS, {family: shape}):
        whole = task_model(family, "causal-lm", implementation, whole=True)
    model = whole.model
    model.to(device).train()
    names = [name for name, _ in model.named_parameters()]
    if fused:
        assert fuse_gates(model) == fuse_decoder(model) == 2
    assert [name for name, _ in model.named_parameters()] == names
    if compile_blocks:
        compiled(whole, backend="inductor" if device == "cuda" else "aot_eager")
    return packed_gradients(model)


def packed_gradients(model):
    lengths = BOUNDS.diff().tolist()
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    ids = torch.arange(225, device=device) * 7 % 90 + 5
    hidden = model.base_model(
        input_ids=ids[None], position_ids=positions[None], cu_seqlens=BOUNDS,
        max_seqlen=90,
    ).last_hidden_state  # fmt: skip
    return weighted_gradients(model, hidden)


def weighted_gradients(model, hidden):
    """Return `hidden`, and the gradient of its weighted sum by parameter name."""
    weights = torch.linspace(-1, 1, hidden.numel(), device=device).view_as(hidden)
    (hidden * weights).sum().backward()
    named = model.named_parameters()
    return hidden.detach(), {n: p.grad for n, p in named if p.grad is not None}


def check_blocks():
    """Check blocks with dropout, for which both versions use the same hash."""
    for family, narrowed, rate in itertools.product(
        ("bert", "roberta"), (False, True), (0.1, 0.0)
    ):
        hidden, want = block_gradients(family, narrowed, rate, fused=False)
        mine, found = block_gradients(family, narrowed, rate, fused=True)
        torch.testing.assert_close(mine, hidden, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-5)


@contextmanager
def few_programs():
    """Use few programs, of which each processes several tokens and the last one fewer.
    The interpreter would need minutes for a thousand idle programs."""
    kernels = "flatout.engine.ops.kernels"
    with (
        patch(f"{kernels}.rotary.PROGRAMS", 3),
        patch(f"{kernels}.residual_norm.PROGRAMS", 3),
    ):
        yield


def check_compiled_blocks():
    """Check that the residual's gradient passes between graphs, with an evaluation
    between."""
    plain = block_gradients("bert", True, 0.1, fused=False)
    mine = block_gradients("bert", True, 0.1, fused=True, compile_blocks=True)
    torch.testing.assert_close(mine[0], plain[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine[1], plain[1], rtol=1e-3, atol=1e-5)


def block_gradients(family, narrowed, rate, *, fused, compile_blocks=False):
    torch.manual_seed(0)
    task = "sequence-classification"
    whole = task_model(family, task, "sdpa", whole=not narrowed)
    model = whole.model
    model.to(device).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = rate
    for layer in model.base_model.encoder.layer:
        layer.attention.self.dropout.p = 0.0
    noise = Noise(torch.device(device))
    noise.seed.fill_(12_345)
    replace_dropout(model, noise)
    if fused:
        assert fuse_blocks(model, noise) == 2
    for module in whole.narrow_points:
        module.target_index = torch.tensor([0, 5], device=device)
    if compile_blocks:
        compiled(whole, backend="inductor" if device == "cuda" else "aot_eager")
        with torch.no_grad():
            model.eval().base_model(input_ids=IDS)
        model.train()
    return weighted_gradients(model, model.base_model(input_ids=IDS).last_hidden_state)


def check_all():
    check_row_attention()
    check_windows(128)
    check_attention_dropout()
    check_compiled_attention()
    check_linear_loss()
    check_rotary()
    check_encoder()
    check_decoders()
    check_blocks()
    check_compiled_blocks()


if __name__ == "__main__":
    torch.manual_seed(0)
    with few_programs():
        check_all()
    if device == "cuda":
        check_all()
    sys.stdout.write("equal\n")
