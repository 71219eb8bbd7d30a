"""The rules for tokenizers: what is set, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from flatout.engine.parameters import ModelSettings
from flatout.engine.tasks import make_task

logger = logging.getLogger(__name__)


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded or used; lists the causes."""


def make_usable(tokenizer: Any, config: dict[str, Any], model: ModelSettings) -> None:
    """Set the padding token and side. Raises TokenizerError if a model with `config`
    cannot be trained with this tokenizer."""
    if faults := list(_faults(tokenizer, config, model)):
        raise TokenizerError(
            f"the tokenizer {tokenizer.name_or_path!r} cannot be used:\n  "
            + "\n  ".join(faults)
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = _pad_candidate(tokenizer)
        logger.info("tokenizer: no pad token; set to %r", tokenizer.pad_token)
    if tokenizer.pad_token == tokenizer.eos_token:
        logger.warning(
            "tokenizer: pad and end of sequence are both %r: flatout tells padding by "
            "the rows' lengths, so the end is still learnt; code that compares token "
            "ids skips it, as decoders that classify do",
            tokenizer.eos_token,
        )
    tokenizer.padding_side = "right"


def _faults(
    tokenizer: Any, config: dict[str, Any], model: ModelSettings
) -> Iterator[str]:
    if not getattr(tokenizer, "is_fast", False):
        yield "it has no tokenizer.json (Rust); convert it with transformers first"
        return
    if tokenizer.pad_token is None and _pad_candidate(tokenizer) is None:
        yield "there is no pad, end, unknown or start token"
    size, rows = len(tokenizer), config.get("vocab_size")
    if rows is not None and size > int(rows):
        what = "the checkpoint's" if model.name_or_path else "model.config's"
        yield (
            f"{size:,} tokens, but {what} vocab_size is {int(rows):,}: they must agree"
        )
    if fault := make_task(model).tokenizer_fault(tokenizer):
        yield fault


def _pad_candidate(tokenizer: Any) -> str | None:
    """Return any token for padding: rows are separated from padding by their length."""
    names = (tokenizer.eos_token, tokenizer.unk_token, tokenizer.bos_token)
    return next((name for name in names if name is not None), None)
