"""Write folders that are either complete or absent, with their content key.

Files are written to a hidden folder next to the target, the key file last. Once all
files are on the disk, this folder replaces the target.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flatout.engine.files.atomic_write import child, write_folder, write_text
from flatout.engine.files.content_key import ContentKey

KEY_FILE = "flatout_key.json"


def is_current(folder: Path, key: ContentKey) -> bool:
    """Return whether `folder` is complete and was created from the inputs in `key`."""
    stored = _read_key_file(folder)
    if not stored or not key.describes(ContentKey(stored["fields"])):
        return False
    with suppress(OSError, ValueError):
        sizes = {n: child(folder, n).stat().st_size for n in stored["files"]}
        return bool(sizes == stored["files"])
    return False


def stored_key(folder: Path) -> ContentKey | None:
    """Return the key that is stored in `folder`, or None if it has no key file."""
    stored = _read_key_file(folder)
    return ContentKey(stored["fields"]) if stored else None


def stored_facts(folder: Path) -> dict[str, Any]:
    """Return the statistics that are stored with `folder`, or {} if there are none."""
    return dict(_read_key_file(folder).get("facts", {}))


def note_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Add `facts` to the statistics stored with `folder`. If the folder has no key file
    or cannot be written to, nothing happens."""
    if stored := _read_key_file(folder):
        stored["facts"] = {**stored.get("facts", {}), **facts}
        with suppress(OSError):
            write_text(folder / KEY_FILE, _as_text(stored))


def _as_text(record: Mapping[str, Any]) -> str:
    return json.dumps(record, indent=2, ensure_ascii=False)


def _read_key_file(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        stored = json.loads((folder / KEY_FILE).read_text(encoding="utf-8"))
        return stored if {"digest", "fields", "files"} <= set(stored) else {}
    return {}


def write_whole(
    folder: Path, key: ContentKey, fill: Callable[[Path], dict[str, Any]]
) -> None:
    """Let `fill` write files into a new folder, store the statistics that it returns
    with the key, and replace `folder`, which is not changed if `fill` fails."""

    def fill_and_note(target: Path) -> None:
        facts = fill(target)
        files = {p.name: p.stat().st_size for p in sorted(target.iterdir())}
        record = {"digest": key.digest, "fields": key.stored()}
        record |= {"facts": facts, "files": files}
        (target / KEY_FILE).write_text(_as_text(record), encoding="utf-8")

    write_folder(folder, fill_and_note)
