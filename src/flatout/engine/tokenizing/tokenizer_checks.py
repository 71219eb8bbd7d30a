"""Check tokenizers, and hash the files of a checkpoint that determine a tokenizer."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flatout.engine.files.content_key import files_hash
from flatout.engine.parameters import ModelSettings
from flatout.engine.rows.vocabulary import first_given
from flatout.engine.tasks import make_task

logger = logging.getLogger(__name__)


class TokenizerError(ValueError):
    """Raised if a tokenizer cannot be loaded or used."""


def make_usable(tokenizer: Any, config: dict[str, Any], model: ModelSettings) -> None:
    """Give `tokenizer` a padding token, and padding and truncation on the right. Raises
    TokenizerError if a model with this `config` cannot be trained with it."""
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
            "tokenizer: pad and end of sequence are both %r: flatout finds padding by "
            "the rows' lengths, so the end is a target; code that compares token ids "
            "skips it, such as decoders that classify",
            tokenizer.eos_token,
        )
    tokenizer.padding_side = "right"
    if tokenizer.truncation_side != "right":
        logger.warning(
            "tokenizer: truncation_side is %r; flatout keeps the beginning of a long "
            "text and saves the tokenizer with 'right'",
            tokenizer.truncation_side,
        )
        tokenizer.truncation_side = "right"


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
    """Return a token for padding, or None if the tokenizer has no special token. Any
    token is suitable, because padding is identified by the lengths of the rows."""
    return first_given(tokenizer.eos_token, tokenizer.unk_token, tokenizer.bos_token)


def files_digest(name: str, revision: str | None) -> str | None:
    """Return a hash of the tokenizer files of a local checkpoint. For a checkpoint on
    the Hub, return its commit, or None if the checkpoint is not in the local cache."""
    folder = Path(name)
    if not folder.is_dir():
        return _hub_commit(name, revision)
    kinds = (".json", ".txt", ".model", ".jinja")
    there = (path for path in sorted(folder.iterdir()) if path.suffix in kinds)
    return files_hash("", ((path.name, path) for path in there if path.is_file()))


def _hub_commit(name: str, revision: str | None) -> str | None:
    """Return the commit of a repository in the local cache, or None if it is not in the
    cache. If the repository on the Hub has changed, loading the weights updates the
    cache, so that the next run uses the new commit."""
    from huggingface_hub.constants import HF_HUB_CACHE

    if revision and re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    refs = Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "refs"
    try:
        return (refs / (revision or "main")).read_text(encoding="utf-8").strip()
    except OSError:
        logger.warning(
            "model.name_or_path %s is not in the local cache, so its commit is not "
            "known yet: set model.revision to a commit, to always have the same one",
            name,
        )
        return None


_COUNT_FROM_PADDING = frozenset(
    {"roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "roberta-prelayernorm"}
    | {"longformer", "mpnet", "data2vec-text", "ibert", "xmod", "layoutlmv3"}
)
"""Model types whose position ids start at padding_idx + 1."""


def usable_positions(config: dict[str, Any], tokenizer: Any = None) -> int | None:
    """Return the maximum number of tokens per row, or None if there is no maximum."""
    size = config.get("max_position_embeddings") or config.get("n_positions")
    if not size or config.get("model_type") not in _COUNT_FROM_PADDING:
        return int(size) if size else None
    own = getattr(tokenizer, "pad_token_id", None)
    pad = first_given(config.get("pad_token_id"), own, 1)
    return int(size) - int(pad) - 1
