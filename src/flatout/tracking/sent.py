"""Progress of sending a run to a store: `sent.json`, from the tracking program."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flatout.engine.files.atomic_write import write_text

SENT = "sent.json"


@dataclass
class Sent:
    """State of one store. Other data of a run are requested from the store."""

    run_id: str | None = None
    steps: dict[str, int] = field(default_factory=dict)
    """Last step of each metric that the store has."""
    model: str | None = None
    """URI of the logged model."""
    ended: list[Any] | None = None
    """Status and end (ms) with which the store has all data of the run."""
    fault: str | None = None
    """Reason why the store accepted no data the last time."""

    @classmethod
    def stores(cls, folder: Path) -> dict[str, Sent]:
        """Return the states by the URI of the store."""
        try:
            found = json.loads((folder / SENT).read_text(encoding="utf-8"))
            return {uri: cls(**known) for uri, known in found.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    @classmethod
    def load(cls, folder: Path, uri: str) -> Sent:
        return cls.stores(folder).get(uri) or cls()

    def save(self, folder: Path, uri: str) -> None:
        stores = {**self.stores(folder), uri: self}
        text = json.dumps({name: asdict(sent) for name, sent in stores.items()})
        write_text(folder / SENT, text)
