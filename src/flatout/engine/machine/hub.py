"""Checkpoints by name: a local folder or a repository of the Hugging Face Hub."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any


def names_a_folder(name: str) -> bool:
    """Return whether `name` must be a path: repositories are `model` or `org/model`."""
    looks = name.startswith((".", "/", "~")) or name.endswith("/") or "\\" in name
    return looks or name.count("/") > 1


def missing_folder(name: str | None) -> str | None:
    """Error message if `model.name_or_path` is a path without a folder, else None."""
    if name is None or Path(name).is_dir() or not names_a_folder(name):
        return None
    return (
        f"model.name_or_path: there is no folder {Path(name).absolute()}. Set it to a "
        "folder that save_pretrained wrote, to a name on the Hugging Face Hub "
        "(org/model), or to null to train from scratch"
    )


def where_to_look(name: str) -> dict[str, Any]:
    """Options for `from_pretrained`: the network is used if it may have the name."""
    path = Path(name).is_dir() or names_a_folder(name)
    return {"local_files_only": path or not answers()}


@cache
def answers() -> bool:
    """Return whether the Hub can be reached from here, through the user's proxies. It
    is asked once: its client tries for half a minute per file."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # the client's transport fails, or it is offline
        return False
    return True
