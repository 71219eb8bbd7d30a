"""Compute a language model's cross entropy without keeping the logits in memory.

The logits of 65,000 tokens over a vocabulary of 32,000 need 4 GiB, and their gradient
needs another 4 GiB. Here, logits exist for only one chunk of tokens at a time. The
forward pass already computes the gradients with respect to the hidden states and the
weight, and the backward pass only scales them. The idea is from Liger-Kernel (Hsu et
al. 2024), whose kernel takes 1.04 to 2.6 times as long (docs/log.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.engine.tasks import IGNORED

CHUNK_TOKENS = 8_192
BLOCK = 4_096
PIECES = 64
"""The vocabulary is padded to a multiple of this number, so that each token's logits
are aligned for tensor cores. For 32,768 hidden states of size 512 and a vocabulary of
30,003, an H200 then needs 6.4 ms instead of 28.2 ms."""


@triton.jit
def _softmax_gradient_kernel(
    logits_ptr, labels_ptr, loss_ptr, width, pieces, ignored,
    block: tl.constexpr,
):  # fmt: skip
    """Process one token: store its loss, and overwrite its logits with their gradient
    (softmax minus one-hot). Columns beyond the vocabulary become zero."""
    token = tl.program_id(0).to(tl.int64)
    logits_ptr += token * width
    label = tl.load(labels_ptr + token)
    most, total = float("-inf"), 0.0
    for begin in range(0, pieces, block):
        place = begin + tl.arange(0, block)
        x = tl.load(logits_ptr + place, mask=place < pieces, other=float("-inf"))
        x = x.to(tl.float32)
        new_most = tl.maximum(most, tl.max(x, 0))
        total = total * tl.exp(most - new_most) + tl.sum(tl.exp(x - new_most), 0)
        most = new_most
    counts = label != ignored
    right = tl.load(logits_ptr + tl.where(counts, label, 0)).to(tl.float32)
    tl.store(loss_ptr + token, tl.where(counts, most + tl.log(total) - right, 0.0))
    tl.debug_barrier()  # read the label's logit before it is overwritten
    for begin in range(0, width, block):
        place = begin + tl.arange(0, block)
        x = tl.load(logits_ptr + place, mask=place < pieces, other=float("-inf"))
        grad = tl.exp(x.to(tl.float32) - most) / total
        grad = tl.where(place == label, grad - 1.0, grad)
        grad = tl.where(counts, grad, 0.0)
        tl.store(
            logits_ptr + place, grad.to(logits_ptr.dtype.element_ty),
            mask=place < width,
        )  # fmt: skip


@torch.library.custom_op("flatout::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, trained: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss for `hidden` (K, H), `weight` (V, H) and `labels` (K,), and its
    gradients with respect to the hidden states (K, H) and the weight (V, H).

    The loss is an fp32 scalar, summed over all labels other than IGNORED. If `trained`
    is false, the fp32 gradient of the weight is empty, with shape (0, H)."""
    pieces = len(weight)
    half = hidden.new_zeros((-(-pieces // PIECES) * PIECES, weight.shape[1]))
    half[:pieces] = weight
    losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    grad_hidden = torch.empty_like(hidden)
    grad_weight = torch.zeros_like(weight[: pieces * trained], dtype=torch.float32)
    for begin in range(0, len(hidden), CHUNK_TOKENS):
        part = slice(begin, begin + CHUNK_TOKENS)
        logits = hidden[part] @ half.t()  # (C, V)
        _softmax_gradient_kernel[(len(logits),)](
            logits, labels[part], losses[part], logits.shape[1], pieces,
            IGNORED, block=BLOCK, num_warps=16,
        )  # fmt: skip
        grad_hidden[part] = logits @ half
        if trained:
            grad_weight += (logits.t() @ hidden[part])[:pieces]
    return losses.sum(), grad_hidden, grad_weight


@linear_cross_entropy.register_fake
def _(hidden, weight, labels, trained=True):  # type: ignore[no-untyped-def]
    return (
        hidden.new_empty((), dtype=torch.float32),
        torch.empty_like(hidden),
        torch.empty_like(weight[: len(weight) * trained], dtype=torch.float32),
    )


def _keep_gradients(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(output[1], output[2])
    ctx.dtype, ctx.trained = inputs[1].dtype, inputs[3]
    ctx.mark_non_differentiable(output[1], output[2])


def _scale_gradients(ctx, grad, *_):  # type: ignore[no-untyped-def]
    grad_hidden, grad_weight = ctx.saved_tensors
    scaled = grad_hidden * grad.to(grad_hidden.dtype)
    own = (grad_weight * grad).to(ctx.dtype) if ctx.trained else None
    return scaled, own, None, None


linear_cross_entropy.register_autograd(_scale_gradients, setup_context=_keep_gradients)
