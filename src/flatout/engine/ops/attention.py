"""Choose the attention kernel, and compute attention without padding.

transformers accepts registered attention functions. They receive q, k and v of shape
(1, heads, P, head_dim) and every extra keyword argument of the model. The function in
this module reads `cu_seqlens` and limits each token's attention to its own row. On a
GPU, it calls PyTorch's flash-attention kernel (Dao 2023) directly, because the public
function `varlen_attn` does not support dropout. For short rows or narrow windows, it
uses a Triton kernel with smaller tiles (kernels/row_attention/). On a CPU, it processes
one row at a time (row_by_row.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flatout.engine.machine.runtime import has_triton
from flatout.engine.ops.row_by_row import Rule, row_by_row

PACKED = "flatout_packed"
"""The name under which attention without padding is registered with transformers."""
ROWS = "flatout_rows"
"""The name of attention without padding on a GPU. Row length decides the kernel."""
PADDED = "flatout_sdpa"
"""The name of transformers' SDPA with a mask that is built without reading from the
device. Reading would make the host wait at every step."""
ROWS_MAX_LENGTH = 512
"""The maximum row length, in tokens, for which the small tiles of the Triton kernel are
faster than those of flash attention. Only rows of up to 320 tokens were measured."""
ROWS_MAX_WINDOW = 256
"""The maximum window, in tokens, for which the small tiles are faster than those of
flash attention, whatever the row length."""
ROWS_HEAD_DIMS = frozenset({16, 32, 64, 128})

FLASH_DTYPES = frozenset({torch.bfloat16, torch.float16})
MAX_FLASH_HEAD_DIM = 256


def register() -> None:
    """Register the attention functions with transformers. For packed rows, transformers
    builds no mask, because no mask function is registered under their names."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(PACKED, packed_attention)
    AttentionInterface.register(ROWS, partial(packed_attention, by_length=True))
    AttentionInterface.register(PADDED, sdpa_attention_forward)
    AttentionMaskInterface.register(PADDED, _padding_mask)


def _padding_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return the mask (B, 1, T, T) that transformers builds for SDPA, or None if
    attention needs no mask."""
    from transformers.masking_utils import sdpa_mask

    if kwargs.get("attention_mask") is not None:
        kwargs["allow_is_causal_skip"] = kwargs["allow_is_bidirectional_skip"] = False
    elif kwargs.get("allow_is_bidirectional_skip") and not kwargs.get("local_size"):
        # In a compiled graph, transformers creates a mask even if it hides no token.
        # SDPA is slow with a mask: 79 instead of 52 ms for a step of ViT-S/16.
        return None
    return sdpa_mask(*args, **kwargs)


def packed_attention(  # noqa: PLR0913 - the signature is transformers'
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    by_length: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention output (1, P, H, D), and None in place of attention weights.
    `query` has the shape (1, H, P, D), and `key` and `value` have the shape (1, G, P,
    D).

    `kwargs` contains the model's arguments `cu_seqlens` (R + 1,) int32 and
    `max_seqlen`. If `by_length` is true, the kernel is chosen by row length.
    """
    causal = is_causal(module, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    span = seen_span(module, sliding_window, causal)
    rule = Rule(scale, dropout, causal, *window(span, causal))
    # Rotary embeddings are fp32 under autocast, but the kernels need a single dtype.
    dtype = value.dtype
    query, key, value = (
        t.squeeze(0).transpose(0, 1).to(dtype) for t in (query, key, value)
    )
    if query.is_cuda:
        cu_seqlens, max_seqlen = kwargs["cu_seqlens"], kwargs["max_seqlen"]
        if by_length and row_tiles_are_faster(max_seqlen, rule):
            qkv, heads = torch.cat([query, key, value], 1), query.shape[1]
            out = row_tiles(qkv, heads, cu_seqlens, max_seqlen, rule)
        else:
            out = _flash(query, key, value, cu_seqlens, max_seqlen, rule)
    else:
        targets = getattr(module, "target_index", None)
        out = _rows_in_fp32(query, key, value, kwargs["cu_seqlens"], rule, targets)
    return out.to(dtype).unsqueeze(0), None


def is_causal(module: nn.Module, given: Mapping[str, Any]) -> bool:
    """Return whether tokens attend only to earlier tokens. This is the argument
    `is_causal` in `given` (the keyword arguments for attention) or, if it is missing,
    the attribute `is_causal` of the module."""
    wanted = given.get("is_causal")
    return bool(getattr(module, "is_causal", False) if wanted is None else wanted)


def seen_span(module: nn.Module, span: int | None, causal: bool) -> int | None:
    """Return the window size `span` with the token itself included, as `window`
    requires. In decoders that the config makes bidirectional, transformers' window
    sizes do not include it, so 1 is added."""
    if span is None or causal or not getattr(module, "is_causal", False):
        return span
    return span + 1


def window(sliding_window: int | None, causal: bool) -> tuple[int, int]:
    """Return `Rule.left` and `Rule.right` for a window that includes the token."""
    if sliding_window is None:
        return (-1, 0) if causal else (-1, -1)
    return (sliding_window - 1, 0 if causal else sliding_window - 1)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    rule: Rule,
) -> Tensor:
    """Return attention (P, H, D) for `query` (P, H, D), `key` and `value` (P, G, D)."""
    result = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        rule.dropout,
        rule.causal,
        False,
        scale=rule.scale,
        window_size_left=None if rule.left < 0 else rule.left,
        window_size_right=None if rule.right < 0 or rule.causal else rule.right,
    )
    return result[0]


def _rows_in_fp32(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    """Call `row_by_row` in fp32. In bf16, oneDNN would compile a matmul for each new
    row length, which took 20 of the 45 to 110 ms per step of a small BERT. fp32 matmuls
    use MKL, which does not compile them."""
    with torch.autocast("cpu", enabled=False):
        return row_by_row(query.float(), key.float(), value.float(), *rest)


def joined_attention(
    qkv: Tensor, heads: int, cu_seqlens: Tensor, max_seqlen: int, rule: Rule
) -> Tensor:
    """Return attention (P, H, D) on a GPU. `qkv` (P, H + 2 G, D) contains query, key
    and value. The kernel is chosen by row length."""
    if row_tiles_are_faster(max_seqlen, rule):
        return row_tiles(qkv, heads, cu_seqlens, max_seqlen, rule)
    groups = (qkv.shape[1] - heads) // 2
    query, key, value = torch.split(qkv, [heads, groups, groups], 1)
    return _flash(query, key, value, cu_seqlens, max_seqlen, rule)


def row_tiles_are_faster(max_seqlen: int, rule: Rule) -> bool:
    """Return whether rows or windows are so short that 128-token tiles would be half
    empty."""
    seen = rule.left + max(rule.right, 0) + 1 if rule.left >= 0 else max_seqlen
    return max_seqlen <= ROWS_MAX_LENGTH or seen <= ROWS_MAX_WINDOW


def row_tiles(
    qkv: Tensor, heads: int, cu_seqlens: Tensor, max_seqlen: int, rule: Rule
) -> Tensor:
    """Return attention (P, H, D), computed with the small tiles of the Triton kernel.
    `qkv` (P, H + 2 G, D) contains query, key and value."""
    from flatout.engine.ops.kernels.row_attention.forward import row_attention

    return row_attention(qkv, heads, cu_seqlens, max_seqlen, *rule)[0]


def head_dimension(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads
    )


def row_tiles_fit(config: Any) -> bool:
    """Return whether the row attention kernel supports this model."""
    return has_triton() and head_dimension(config) in ROWS_HEAD_DIMS


def kernel_fault(config: Any, device_type: str, dtype: torch.dtype) -> str | None:
    """Return why the flash kernel cannot be used, or None if it can or need not be."""
    if device_type != "cuda":
        return None
    if dtype not in FLASH_DTYPES:
        return f"the flash kernel computes in bf16 or fp16, not {dtype}"
    head_dim = head_dimension(config)
    if head_dim % 8 or head_dim > MAX_FLASH_HEAD_DIM:
        return (
            f"head dimension {head_dim} is not a multiple of 8 that is at most "
            f"{MAX_FLASH_HEAD_DIM}"
        )
    return None
