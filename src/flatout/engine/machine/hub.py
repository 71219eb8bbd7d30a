"""Checkpoints by name: a folder here, or a repository of the Hugging Face Hub."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

LIMIT_S = 5.0
"""For the Hub's first answer; by itself its client tries for half a minute a file.
The client's own HF_HUB_ETAG_TIMEOUT, where it is set, goes before."""


def names_a_folder(name: str) -> bool:
    """Whether `name` can only be a path: repositories are `model` or `org/model`."""
    looks = name.startswith((".", "/", "~")) or name.endswith("/") or "\\" in name
    return looks or name.count("/") > 1


def missing_folder(name: str | None) -> str | None:
    """What to say of `model.name_or_path`, where it is the path of no folder."""
    if name is None or Path(name).is_dir():
        return None
    if not names_a_folder(name) and not _misses_its_parent(name):
        return None
    return (
        f"model.name_or_path: there is no folder {Path(name).absolute()}. Set it to a "
        "folder that save_pretrained wrote, to a name on the Hugging Face Hub "
        "(org/model), or to null to train from scratch"
    )


def _misses_its_parent(name: str) -> bool:
    """Whether `org/model` is meant as a path: a folder `org` is here, and neither the
    cache nor the Hub has the repository."""
    parent = Path(name).parent
    if parent == Path() or not parent.is_dir():
        return False
    from huggingface_hub import repo_exists
    from huggingface_hub.constants import HF_HUB_CACHE

    if Path(HF_HUB_CACHE, f"models--{name.replace('/', '--')}").is_dir():
        return False
    try:
        return not (answers() and repo_exists(name))
    except Exception:  # of the client's transport; loading says why
        return False


def where_to_look(name: str) -> dict[str, Any]:
    """Options of `from_pretrained`: the network only for a name, where it answers."""
    path = Path(name).is_dir() or names_a_folder(name)
    return {"local_files_only": path or not answers()}


def _limit_s() -> float:
    from huggingface_hub.constants import DEFAULT_ETAG_TIMEOUT, HF_HUB_ETAG_TIMEOUT

    is_set = HF_HUB_ETAG_TIMEOUT != DEFAULT_ETAG_TIMEOUT
    return HF_HUB_ETAG_TIMEOUT if is_set else LIMIT_S


@cache
def answers() -> bool:
    """Whether the Hub can be reached from here, through the user's proxies."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_limit_s())
    except Exception:  # of the client's transport, or its offline mode
        return False
    return True
