"""Check whether token rows on disk match the parameters of the run that reads them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flatout.engine.files.arrow_folder import without_indices
from flatout.engine.files.content_key import ContentKey, arrow_digest
from flatout.engine.files.keyed_folder import stored_facts, stored_key
from flatout.engine.parameters import Settings
from flatout.engine.tokenizing.token_recipes import token_options
from flatout.engine.tokenizing.tokenizer import FILES, TokenizerFile

logger = logging.getLogger(__name__)


class StaleTokensError(ValueError):
    """Raised if token rows were created from inputs that differ from those of this run.
    The message lists the differences."""


def folder_of(tokens: Any) -> Path | None:
    """Return the folder that contains exactly the rows of a `datasets.Dataset`, or None
    if there is no such folder."""
    files = tokens.cache_files
    if not files or tokens._indices is not None:
        return None
    folder = Path(files[0]["filename"]).parent
    return folder if stored_facts(folder).get("rows") == len(tokens) else None


def key_of(tokens: Any) -> ContentKey | None:
    """Return the key stored with `tokens`, or None if `folder_of` finds no folder."""
    folder = folder_of(tokens)
    return None if folder is None else stored_key(folder)


def facts_of(tokens: Any) -> dict[str, Any]:
    """Return the statistics stored with `tokens`, or {} if there are none."""
    folder = folder_of(tokens)
    return {} if folder is None else stored_facts(folder)


def token_key(tokens: Any) -> str:
    """Return a digest of the inputs from which `tokens` were created or, if the inputs
    are unknown, a digest of the token rows."""
    key = key_of(tokens)
    return key.digest if key else arrow_digest([without_indices(tokens).data.table])


def keys_of(splits: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the digest of the key stored with each split, or None without a key."""
    found = {name: key_of(rows) for name, rows in splits.items()}
    return {name: key.digest if key else None for name, key in found.items()}


def warn_if_replaced(keys: Mapping[str, str | None], splits: Mapping[str, Any]) -> None:
    """Log a warning if the rows of `splits` have been replaced since the start of the
    run, when `keys_of` returned `keys`."""
    now = keys_of(splits)
    names = [name for name, key in keys.items() if key and now[name] != key]
    if names:
        logger.warning(
            "the rows of %s were replaced while the training ran: the model and its "
            "report are of the rows before. An evaluation of the new ones counts those "
            "that were trained on",
            ", ".join(names),
        )


def check_tokens_match(
    splits: Mapping[str, Any],
    settings: Settings,
    tokenizer: Any,
    label_names: Sequence[str],
) -> None:
    """Raise StaleTokensError if the parameters, the tokenizer or the label names have
    changed since the rows of `splits` were created, or if the splits are of different
    data. Rows without a key (e.g. in memory) only cause a warning."""
    keys = {f"{name}_tokens": key_of(rows) for name, rows in splits.items()}
    known = {name: key for name, key in keys.items() if key is not None}
    if len(known) < len(keys):
        missing = ", ".join(sorted(set(keys) - set(known)))
        logger.warning("%s: rows without a key are used as they are", missing)
    faults: dict[str, list[str]] = {}
    for name, key in known.items():
        changes = changed_options(key, settings)
        changes += _changed_inputs(key, _digest_of(tokenizer), list(label_names))
        for change in changes:
            faults.setdefault(change, []).append(name)
    if len({key.fields.get("splits") for key in known.values()}) > 1:
        faults["splits: they are from different data"] = list(known)
    if faults:
        raise StaleTokensError(
            "the token rows were created from other inputs (then -> now): "
            + "; ".join(f"{text} ({', '.join(at)})" for text, at in faults.items())
            + ". Run kedro run --pipelines=split,tokenize with the same --env and "
            "--params, or set the parameters back"
        )


def _changed_inputs(
    key: ContentKey, tokenizer: str | None, label_names: list[str]
) -> list[str]:
    """Return descriptions of the changed inputs that are not parameters."""
    changes = []
    if tokenizer is not None and key.fields.get("tokenizer") != tokenizer:
        changes.append("tokenizer: its files have changed")
    stored = key.fields.get("label_names") or []
    if stored != label_names:
        odd = sorted(set(stored) ^ set(label_names))
        example = f", such as {odd[0]!r}" if odd else " in a different order"
        changes.append(f"label_names: {len(stored)} -> {len(label_names)}{example}")
    return changes


def _digest_of(tokenizer: Any) -> str | None:
    """Return a transformers tokenizer's digest, or None if its folder is unknown."""
    folder = Path(tokenizer.name_or_path or "")
    found = all((folder / name).is_file() for name in FILES)
    return TokenizerFile(folder).digest if found else None


def changed_options(key: ContentKey, settings: Settings) -> list[str]:
    """Return a description such as `tokenize.max_length: 320 -> 128` of each parameter
    that has changed since the rows with the key `key` were created."""
    wanted = ContentKey(token_options(settings.model, settings.tokenize))
    stored = ContentKey({name: key.fields.get(name) for name in wanted.fields})
    return wanted.changes_since(stored)
