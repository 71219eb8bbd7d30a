"""The properties of a tokenizer that training needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Vocabulary:
    """The size and special tokens of a tokenizer."""

    size: int
    pad_token_id: int
    mask_token_id: int | None = None
    special_token_ids: tuple[int, ...] = ()
    """The ids of all special tokens, in ascending order."""
    unknown_token_id: int | None = None
    """Id of the token that replaces text outside the vocabulary."""
    start_token_id: int | None = None
    """Id of the token that starts a text: the BOS token, or else the CLS token."""
    end_token_id: int | None = None
    """Id of the token that ends a text: the EOS token, or else the SEP token."""

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        """Read the properties of a transformers tokenizer."""
        return cls(
            size=len(tokenizer),
            pad_token_id=int(tokenizer.pad_token_id),
            mask_token_id=tokenizer.mask_token_id,
            special_token_ids=tuple(sorted(set(tokenizer.all_special_ids))),
            unknown_token_id=tokenizer.unk_token_id,
            start_token_id=first_given(tokenizer.bos_token_id, tokenizer.cls_token_id),
            end_token_id=first_given(tokenizer.eos_token_id, tokenizer.sep_token_id),
        )


def first_given(*values: Any) -> Any:
    """Return the first of `values` that is not None, or None."""
    return next((value for value in values if value is not None), None)
