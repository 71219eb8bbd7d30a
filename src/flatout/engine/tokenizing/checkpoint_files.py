"""Files of a checkpoint from which its tokenizer is made."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import xxhash

logger = logging.getLogger(__name__)


def files_digest(name: str, revision: str | None) -> str | None:
    """Hash of a local checkpoint's tokenizer files; for a name on the Hub, its commit
    if the local cache contains it."""
    folder = Path(name)
    if not folder.is_dir():
        return _hub_commit(name, revision)
    state = xxhash.xxh3_128()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja"):
            state.update(path.name.encode() + path.read_bytes())
    return str(state.hexdigest())


def _hub_commit(name: str, revision: str | None) -> str | None:
    """Return the commit in the local cache. Loading the model's weights updates the
    cache if the repository has changed, and the next run uses the new commit."""
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
