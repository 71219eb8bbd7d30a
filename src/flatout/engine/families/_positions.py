"""Number of positions that a model has for the tokens of a row; without torch."""

from __future__ import annotations

from typing import Any

_COUNT_FROM_PADDING = frozenset(
    {"roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "roberta-prelayernorm"}
    | {"longformer", "mpnet", "data2vec-text", "ibert", "xmod", "layoutlmv3"}
)
"""Model types whose first token has the position padding_idx + 1."""


def usable_positions(config: dict[str, Any], tokenizer: Any = None) -> int | None:
    """Longest row of a model in tokens; None without a maximum."""
    for name in ("max_position_embeddings", "n_positions"):
        if config.get(name):
            size = int(config[name])
            break
    else:
        return None
    if config.get("model_type") in _COUNT_FROM_PADDING:
        pad = config.get("pad_token_id")
        if pad is None:
            pad = getattr(tokenizer, "pad_token_id", None)
        return size - int(1 if pad is None else pad) - 1
    return size
