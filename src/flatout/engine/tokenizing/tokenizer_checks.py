"""The rules for tokenizers as a table of checks, and the maximum row length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from flatout.engine.parameters import ModelSettings
from flatout.engine.tasks import make_task


@dataclass(frozen=True)
class Check:
    """One line of the table of checks."""

    name: str
    status: Literal["ok", "corrected", "warning", "failed"]
    text: str


def pad_candidate(tokenizer: Any) -> str | None:
    """Return any token for padding: rows are separated from padding by their length."""
    names = (tokenizer.eos_token, tokenizer.unk_token, tokenizer.bos_token)
    return next((name for name in names if name is not None), None)


def check_tokenizer(
    tokenizer: Any, config: dict[str, Any], model: ModelSettings
) -> list[Check]:
    """Apply the rules for pad token, padding side and other causes of errors."""
    if not getattr(tokenizer, "is_fast", False):
        text = "it has no tokenizer.json (Rust); convert it with transformers first"
        return [Check("fast", "failed", text)]
    return [
        Check("fast", "ok", "Rust tokenizer"),
        _check_pad(tokenizer),
        _check_pad_is_end(tokenizer),
        _check_side(tokenizer),
        _check_vocabulary(tokenizer, config, model),
        _check_mask(tokenizer, model),
        _check_special(tokenizer),
    ]


def _check_pad(tokenizer: Any) -> Check:
    if tokenizer.pad_token is not None:
        return Check("pad token", "ok", repr(tokenizer.pad_token))
    candidate = pad_candidate(tokenizer)
    if candidate is None:
        return Check(
            "pad token", "failed", "there is no pad, end, unknown or start token"
        )
    return Check("pad token", "corrected", f"missing; set to {candidate!r}")


def _check_pad_is_end(tokenizer: Any) -> Check:
    name, end = "pad is not end", tokenizer.eos_token
    pad = tokenizer.pad_token or pad_candidate(tokenizer)
    if end is None or pad != end:
        return Check(name, "ok", f"pad {pad!r}, end {end!r}")
    return Check(
        name,
        "warning",
        f"pad and end of sequence are both {end!r}: flatout tells padding by the "
        "rows' lengths, so the end is still learnt; code that compares token ids would "
        "skip it",
    )


def _check_side(tokenizer: Any) -> Check:
    if tokenizer.padding_side == "right":
        return Check("padding side", "ok", "right")
    return Check("padding side", "corrected", f"{tokenizer.padding_side}; set to right")


def _check_vocabulary(
    tokenizer: Any, config: dict[str, Any], model: ModelSettings
) -> Check:
    size, rows = len(tokenizer), config.get("vocab_size")
    if rows is None or size <= int(rows):
        return Check("vocabulary", "ok", f"{size:,} tokens")
    what = "the checkpoint's" if model.name_or_path else "model.config's"
    text = f"{size:,} tokens, but {what} vocab_size is {int(rows):,}: they must agree"
    return Check("vocabulary", "failed", text)


def _check_mask(tokenizer: Any, model: ModelSettings) -> Check:
    fault = make_task(model).tokenizer_fault(tokenizer)
    if fault is None:
        return Check("mask token", "ok", repr(tokenizer.mask_token))
    return Check("mask token", "failed", fault)


def _check_special(tokenizer: Any) -> Check:
    count = tokenizer.backend_tokenizer.num_special_tokens_to_add(False)
    text = f"{count} added to each text"
    return Check(
        "special tokens", "ok", text if count else "none are added by this one"
    )
