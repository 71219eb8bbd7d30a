"""Find checkpoints by name, in a local folder or on the Hugging Face Hub."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any


def names_a_folder(name: str) -> bool:
    """Return whether `name` looks like a path rather than the name of a repository
    (`model` or `org/model`)."""
    looks = name.startswith((".", "/", "~")) or name.endswith("/") or "\\" in name
    return looks or name.count("/") > 1


def missing_folder(name: str | None) -> str | None:
    """Return an error message if `name` is the path of a missing folder, else None."""
    if name is None or Path(name).is_dir() or not names_a_folder(name):
        return None
    return (
        f"model.name_or_path: there is no folder {Path(name).absolute()}. Set it to a "
        "folder that save_pretrained wrote, to a name on the Hugging Face Hub "
        "(org/model), or to null to train from scratch"
    )


def where_to_look(name: str) -> dict[str, Any]:
    """Return the option `local_files_only` for `from_pretrained`. Downloads are allowed
    only if `name` may be a repository and the Hub can be reached."""
    path = Path(name).is_dir() or names_a_folder(name)
    return {"local_files_only": path or not answers()}


@cache
def answers() -> bool:
    """Return whether the Hub can be reached, through the user's proxies if there are
    any. The result is cached, because the client retries for half a minute per file."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # a transport error, or the client is in offline mode
        return False
    return True
