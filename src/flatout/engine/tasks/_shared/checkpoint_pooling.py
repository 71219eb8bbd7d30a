"""Read the pooling mode of a sentence-transformers checkpoint."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from flatout.engine.machine.hub import where_to_look
from flatout.engine.tasks._task import TaskError

logger = logging.getLogger(__name__)

MODES = {"mean": "mean", "cls": "first", "lasttoken": "last"}
"""flatout's names of the pooling modes of sentence-transformers."""
OLD_KEY = re.compile("pooling_mode_(.+?)(_tokens?)?")
"""Matches the config keys of pooling modes that sentence-transformers used before
version 6, e.g. `pooling_mode_mean_tokens`."""
DEFAULT = "mean"
"""The pooling mode that sentence-transformers uses if a model has no pooling config."""
KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")


def checkpoint_pooling(name: str | None, revision: str | None) -> str:
    """Return the pooling mode (mean, first or last) of a model folder or Hub
    repository. Raises TaskError if the model computes its vectors in another way."""
    if name is None:
        return DEFAULT
    for module in _read(name, revision, "modules.json") or []:
        kind = str(module["type"]).rpartition(".")[2]
        if kind not in KNOWN_MODULES:
            raise TaskError(
                f"model.name_or_path: {name} has a module {kind} after its "
                "transformer, which flatout does not train: use another checkpoint, "
                "or set model.pooling to train only its transformer"
            )
    about = _read(name, revision, "config_sentence_transformers.json") or {}
    if prompt := about.get("default_prompt_name"):
        logger.warning(
            "%s puts the prompt %r before each text; flatout does not, and saves the "
            "model without prompts: if you want one, write it into the texts",
            name,
            about.get("prompts", {}).get(prompt, prompt),
        )
    found = _read(name, revision, "1_Pooling/config.json")
    if found is None:
        if not Path(name).is_dir() and where_to_look(name).get("local_files_only"):
            raise TaskError(
                f"model.pooling: whether {name} names its pooling is unknown, because "
                "1_Pooling/config.json is not in the cache and the Hub cannot be "
                "reached: set model.pooling to mean, first or last"
            )
        return DEFAULT
    mode = found.get("pooling_mode")
    old = filter(None, (OLD_KEY.fullmatch(key) for key in found if found[key]))
    mode = mode or [match[1] for match in old]
    modes = [mode] if isinstance(mode, str) else list(mode)
    if len(modes) != 1 or modes[0] not in MODES:
        raise TaskError(
            f"model.name_or_path: {name} pools by {' and '.join(modes) or 'nothing'}, "
            "and flatout by mean, first or last: set model.pooling to one of them"
        )
    return MODES[modes[0]]


def _read(name: str, revision: str | None, file: str) -> Any | None:
    """Return the content of a checkpoint's JSON file, or None if it is missing."""
    from transformers.utils import cached_file

    try:
        where = {"revision": revision, **where_to_look(name)}
        path = cached_file(
            name,
            file,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **where,
        )
        if path is None:
            return None
        with open(path, encoding="utf-8") as opened:
            return json.load(opened)
    except (OSError, ValueError) as error:
        raise TaskError(f"model.name_or_path: {name}/{file}: {error}") from error
