"""Whether token rows on the disk fit the parameters of the run that reads them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from flatout.engine.data.arrow_folder import without_indices
from flatout.engine.data.content_key import ContentKey, arrow_digest
from flatout.engine.data.whole_folder import stored_facts, stored_key
from flatout.engine.settings import Settings
from flatout.engine.tokenizing.encode import token_options

logger = logging.getLogger(__name__)


class StaleTokensError(ValueError):
    """Token rows that were made with other parameters; names them."""


def folder_of(tokens: Any) -> Path | None:
    """The folder that a `datasets.Dataset` is the whole of; None for a part of one,
    which names the same files."""
    files = tokens.cache_files
    if not files or tokens._indices is not None:
        return None
    folder = Path(files[0]["filename"]).parent
    return folder if stored_facts(folder).get("rows") == len(tokens) else None


def key_of(tokens: Any) -> ContentKey | None:
    """The key beside token rows that were loaded whole from a folder."""
    folder = folder_of(tokens)
    return None if folder is None else stored_key(folder)


def facts_of(tokens: Any) -> dict[str, Any]:
    """What was counted while `tokens` was made, as `cut_rows`; empty if unknown."""
    folder = folder_of(tokens)
    return {} if folder is None else stored_facts(folder)


def token_key(tokens: Any) -> str:
    """Digest of what `tokens` was made from; of its content where that is unknown."""
    key = key_of(tokens)
    return key.digest if key else arrow_digest([without_indices(tokens).data.table])


def check_tokens_match(tokens: Any, settings: Settings) -> None:
    """Raises StaleTokensError naming each parameter that was another when `tokens`
    was made. Rows without a key (in memory, or made elsewhere) pass with a warning."""
    key = key_of(tokens)
    if key is None:
        logger.warning("the token rows carry no key: taken as they are")
        return
    changes = changed_options(key, settings)
    if changes:
        raise StaleTokensError(
            "the token rows were made with other parameters (then -> now): "
            + "; ".join(changes)
            + ". Run kedro run --pipelines=tokenize, or set the parameters back"
        )


def changed_options(key: ContentKey, settings: Settings) -> list[str]:
    """`tokenize.max_length: 320 -> 128`, a text a parameter that was another."""
    wanted = ContentKey(token_options(settings.model, settings.tokenize))
    stored = ContentKey({name: key.fields.get(name) for name in wanted.fields})
    return wanted.changes_since(stored)
