"""FlashAttention 4 of rows laid end to end, where flash-attn-4 is installed.

Its kernels are made for Hopper and Blackwell, and each is compiled at its first call,
in two to three seconds. The package is no dependency of flatout, and a beta: who wants
it asks for it (`runtime.attention: flash4`).

Legend: P tokens, R rows, H query heads, G key heads, D head dimension.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatout.engine.ops.attention import head_dimension, row_tiles_fit
from flatout.engine.parameters.faults import first_line

INSTALL = "pip install 'flash-attn-4[cu13]==4.0.0b36'"
DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")
"""What models call that of attention."""


class Seen(NamedTuple):
    """Rows, and what a token sees of its own."""

    bounds: Tensor
    """(R + 1,) int32."""
    longest: int
    scale: float
    causal: bool
    window_size_left: int | None
    window_size_right: int | None
    """Tokens of a window to both sides; None is unbounded."""

    def arguments(self) -> dict[str, Any]:
        """As both passes have them."""
        return {
            "cu_seqlens_q": self.bounds,
            "cu_seqlens_k": self.bounds,
            "max_seqlen_q": self.longest,
            "max_seqlen_k": self.longest,
            "softmax_scale": self.scale,
            "causal": self.causal,
            "window_size_left": self.window_size_left,
            "window_size_right": self.window_size_right,
        }


def forward(parts: Sequence[Tensor], seen: Seen) -> tuple[Tensor, Tensor]:
    """Query (P, H, D), key and value (P, G, D) -> out (P, H, D), log-sum-exp (H, P)."""
    out, sums, *_ = _package()._flash_attn_fwd(
        *parts, return_lse=True, **seen.arguments()
    )
    return out, sums


def backward(
    grad: Tensor,
    parts: Sequence[Tensor],
    out: Tensor,
    sums: Tensor,
    seen: Seen,
    results: Sequence[Tensor],
) -> None:
    """Write the gradients of `parts` to `results`, which may lie side by side."""
    given = dict(zip(("dq", "dk", "dv"), results, strict=True))
    _package()._flash_attn_bwd(*parts, out, grad, sums, **given, **seen.arguments())


def fault(config: Any, device: torch.device) -> str | None:
    """Why it does not take a model's rows here; None where it does."""
    if device.type != "cuda" or not _is_made_for(device):
        return "it is made for NVIDIA's Hopper and Blackwell"
    if torch.are_deterministic_algorithms_enabled():
        return "it does not give the same bits again, as runtime.deterministic asks"
    dropout = next((name for name in DROPOUTS if getattr(config, name, 0.0)), None)
    if dropout:
        return f"it has no dropout, and the model's {dropout} is not 0"
    if not row_tiles_fit(config):
        return f"head dimension {head_dimension(config)} has no kernel for short rows"
    return _import_fault()


def _is_made_for(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def _import_fault() -> str | None:
    try:
        package = _package()
    except Exception as error:  # a broken one raises anything
        reason = first_line(error)
        return f"flash-attn-4 cannot be imported ({reason}): {INSTALL}"
    known = all(hasattr(package, f"_flash_attn_{way}") for way in ("fwd", "bwd"))
    return None if known else f"flash-attn-4 has other functions: {INSTALL}"


@cache
def _package() -> Any:
    interface = import_module("flash_attn.cute.interface")
    # Said of an argument that none of our calls has.
    warnings.filterwarnings("ignore", message="Argument aux_data")
    return interface
