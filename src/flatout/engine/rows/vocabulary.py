"""What the engine needs to know of a tokenizer."""

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
    """In rising order."""
    unknown_token_id: int | None = None
    """Stands for what the vocabulary has not."""

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        """Of a transformers tokenizer."""
        return cls(
            size=len(tokenizer),
            pad_token_id=int(tokenizer.pad_token_id),
            mask_token_id=tokenizer.mask_token_id,
            special_token_ids=tuple(sorted(set(tokenizer.all_special_ids))),
            unknown_token_id=tokenizer.unk_token_id,
        )
