"""Compute attention inside concatenated rows on a CPU, one row at a time.

The code uses plain matmuls and softmax. `scaled_dot_product_attention` would be slower,
because it also scales the keys, handles queries without any visible key, and draws each
dropout number separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flatout.engine.ops.dropout import drawn_mask


class Rule(NamedTuple):
    """The scale and the dropout rate of attention, and the tokens that are visible."""

    scale: float
    dropout: float
    causal: bool
    left: int
    """The number of visible tokens before a token, or -1 for all of them."""
    right: int
    """The number of visible tokens after a token, or -1 for all of them."""


def row_by_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    rule: Rule,
    targets: Tensor | None = None,
) -> Tensor:
    """Return the attention output (P, H, D) for `query` (P, H, D), `key` and `value`
    (P, G, D). Tokens attend only to tokens of the same row. `cu_seqlens` (R + 1,)
    contains the row boundaries.

    If `targets` (K,) is given, the output is computed only for these tokens and is zero
    for all others. `targets` is ignored if attention is causal or has windows.
    """
    group = query.shape[1] // key.shape[1]
    q, k, v = (t.transpose(0, 1) for t in (query * rule.scale, key, value))
    if group > 1:
        k, v = (t.repeat_interleave(group, 0) for t in (k, v))
    if targets is None or rule.causal or rule.left >= 0:
        return _rows(q, k, v, cu_seqlens, cu_seqlens, rule).transpose(0, 1)
    targets = torch.unique(targets)  # sorted, without duplicates from padding
    bounds = torch.searchsorted(targets, cu_seqlens.to(targets.dtype))
    asked = _rows(q[:, targets], k, v, bounds, cu_seqlens, rule)
    return torch.zeros_like(query).index_copy(0, targets, asked.transpose(0, 1))


def _rows(
    q: Tensor, k: Tensor, v: Tensor, q_bounds: Tensor, bounds: Tensor, rule: Rule
) -> Tensor:
    """Return the attention (H, Q, D) of queries (H, Q, D) to the keys and values (H, P,
    D) of their row. `q_bounds` and `bounds` (R + 1,) are their row boundaries."""
    lengths, asked = bounds.diff().tolist(), q_bounds.diff().tolist()
    heads = q.shape[0]
    # The gradient of a split is one concatenation, but slices would add many zeros.
    parts = (
        torch.split(q, asked, 1),
        torch.split(k.transpose(1, 2), lengths, 2),  # (H, D, n) each
        torch.split(v, lengths, 1),
    )
    sizes = [heads * n * m for n, m in zip(asked, lengths, strict=True)]
    masks: Sequence[Tensor | None] = [None] * len(sizes)
    if rule.dropout:
        masks = torch.split(drawn_mask(sum(sizes), rule.dropout, q), sizes)
    rows = []
    for queries, keys, values, mask in zip(*parts, masks, strict=True):
        # `@` would add five views and their gradients to each matmul. For 16 rows on
        # two cores, forward and backward would take 16 ms instead of 12 ms.
        scores = torch.bmm(queries, keys)
        hidden = _hidden(keys.shape[2], rule, q.device)
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        weights = scores.softmax(-1)
        if mask is not None:
            weights = weights * mask.view_as(weights)
        rows.append(torch.bmm(weights, values))
    return torch.cat(rows, 1)


def _hidden(length: int, rule: Rule, device: torch.device) -> Tensor | None:
    """Return a mask (length, length) that is True if the query of a row may not attend
    to the key of a column, or None if all keys are visible."""
    bounded = 0 <= rule.left < length - 1
    if not rule.causal and not bounded:
        return None
    place = torch.arange(length, device=device)
    distance = place[None, :] - place[:, None]
    hidden = distance > rule.right if rule.right >= 0 else distance > length
    return hidden | (distance < -rule.left) if bounded else hidden
