"""Triton kernels against plain PyTorch: on a GPU, and elsewhere in Triton's own
interpreter, which runs the same code."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton comes with CUDA builds of PyTorch"
)
PROGRAM = """
import torch
from flatout.engine.row_by_row import Rule, row_by_row
from flatout.engine.kernels.linear_loss import linear_cross_entropy
from flatout.engine.kernels.row_attention import row_attention

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
bounds = torch.tensor([0, 5, 95, 96, 160, 225, 225], dtype=torch.int32, device=device)
for heads, groups, causal, window in [
    (2, 2, False, (-1, -1)), (4, 2, True, (-1, 0)), (2, 2, False, (8, 8)),
]:
    qkv = [
        torch.randn(225, n, 16, device=device, requires_grad=True)
        for n in (heads, groups, groups)
    ]
    grad = torch.randn(225, heads, 16, device=device)
    want = row_by_row(*qkv, bounds, Rule(0.25, 0.0, causal, *window))
    joined = torch.cat(qkv, 1)
    got = row_attention(joined, heads, bounds, 90, 0.25, 0.0, causal, *window)[0]
    pairs = zip(
        (got, *torch.autograd.grad(got, qkv, grad)),
        (want, *torch.autograd.grad(want, qkv, grad)), strict=True,
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)

def loss(q):
    torch.manual_seed(5)
    joined = torch.cat([q, *qkv[1:]], 1)
    out = row_attention(joined, 2, bounds, 90, 0.25, 0.3, False, -1, -1)[0]
    return out.double().square().sum()

q = qkv[0]
slope = torch.autograd.grad(loss(q), q)[0].double()
way = torch.randn_like(q)
measured = (loss(q + 1e-2 * way) - loss(q - 1e-2 * way)) / 2e-2
# On a GPU the products are TF32, and the quotient magnifies their rounding.
torch.testing.assert_close(measured.detach(), (slope * way).sum(), rtol=5e-2, atol=1e-2)

hidden = torch.randn(40, 8, device=device, requires_grad=True)
weight = torch.randn(5000, 8, device=device, requires_grad=True)
labels = torch.randint(0, 5000, (40,), device=device)
labels[3] = -100
ours = linear_cross_entropy(hidden, weight, labels)[0]
plain = torch.nn.functional.cross_entropy(hidden @ weight.t(), labels, reduction="sum")
torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-3)
for one, other in zip(
    torch.autograd.grad(ours * 0.5, (hidden, weight)),
    torch.autograd.grad(plain * 0.5, (hidden, weight)), strict=True,
):
    torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
print("equal")
"""


def test_kernels_equal_plain_pytorch():
    environment = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    from flatout.engine.environment import child_environment

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=child_environment(environment),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout.strip().endswith("equal"), done.stderr[-3000:]
