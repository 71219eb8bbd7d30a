"""Use FlashAttention 4 for long rows if a fitting version of flash-attn-4 is installed.

FlashAttention 4 then replaces PyTorch's own flash kernel in the whole process. Its
backward pass supports neither dropout nor windows, so PyTorch's kernel is kept for
models with dropout or windows.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from flatout.engine.ops.attention import ROWS_MAX_LENGTH, ROWS_MAX_WINDOW
from flatout.engine.parameters.faults import first_line

logger = logging.getLogger(__name__)

PACKAGE, NAME, NEWEST = "flash-attn-4", "FA4", "4.0.0b18"
"""NEWEST is the newest fitting version of the package. The forward function of later
versions returns more values than PyTorch 2.11 to 2.13 unpack."""
CAPABILITIES = (9, 10)
"""The major compute capabilities that FlashAttention 4 supports (Hopper, Blackwell)."""
DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")
"""The names that model configs use for the attention dropout."""


def choose_flash_kernel(config: Any, device: torch.device, longest: int) -> None:
    """Choose the flash kernel for packed rows of up to `longest` tokens."""
    if device.type != "cuda":
        return
    is_active = current_flash_attention_impl() == NAME
    wanted = longest > ROWS_MAX_LENGTH and fits_flash4(config, device)
    if is_active and not wanted:
        restore_flash_attention_impl(_raise_warn=False)
    if wanted and not is_active:
        _activate()


def _activate() -> None:
    try:
        activate_flash_attention_impl(NAME)
    except Exception as error:  # a broken package may raise anything
        reason = first_line(error)
        logger.warning("FlashAttention 4 is unavailable (%s): using PyTorch", reason)
        return
    logger.info("rows of over %d tokens use FlashAttention 4", ROWS_MAX_LENGTH)


def fits_flash4(config: Any, device: torch.device) -> bool:
    """Return whether FlashAttention 4 can be used and supports the model and the
    device. It is not used if deterministic algorithms are required."""
    window = getattr(config, "sliding_window", None)
    # Shorter windows use narrow tiles. Some models give the window size per side.
    windowed = window is not None and 2 * window + 1 > ROWS_MAX_WINDOW
    return not (
        windowed
        or any(getattr(config, name, 0.0) for name in DROPOUTS)
        or torch.are_deterministic_algorithms_enabled()
        or torch.cuda.get_device_capability(device)[0] not in CAPABILITIES
        or not has_flash4()
    )


@cache
def has_flash4() -> bool:
    """Return whether PACKAGE is installed in a version that PyTorch can call. If it is
    too new, log a warning, once per process because the result is cached."""
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        return False
    fits = SpecifierSet(f"<={NEWEST}", prereleases=True).contains(found)
    if not fits:
        logger.warning(
            "PyTorch %s cannot call %s %s, so PyTorch's own attention kernel is used: "
            "to use FlashAttention 4, install '%s[cu13]==%s'",
            *(torch.__version__, PACKAGE, found, PACKAGE, NEWEST),
        )
    return fits
