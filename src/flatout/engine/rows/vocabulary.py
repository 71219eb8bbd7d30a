"""Facts about a tokenizer that the engine needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Vocabulary:
    """Size and special tokens."""

    size: int
    pad_token_id: int
    mask_token_id: int | None = None
    special_token_ids: tuple[int, ...] = ()
    """Special token ids in ascending order."""
    unknown_token_id: int | None = None
    """Token for text outside of the vocabulary."""
    start_token_id: int | None = None
    """Token before a text: the begin token, else the class token."""
    end_token_id: int | None = None
    """Token after a text: the end token, else the separator."""

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        """Read the facts from a transformers tokenizer."""
        return cls(
            size=len(tokenizer),
            pad_token_id=int(tokenizer.pad_token_id),
            mask_token_id=tokenizer.mask_token_id,
            special_token_ids=tuple(sorted(set(tokenizer.all_special_ids))),
            unknown_token_id=tokenizer.unk_token_id,
            start_token_id=_first(tokenizer.bos_token_id, tokenizer.cls_token_id),
            end_token_id=_first(tokenizer.eos_token_id, tokenizer.sep_token_id),
        )


def _first(*numbers: int | None) -> int | None:
    return next((number for number in numbers if number is not None), None)
