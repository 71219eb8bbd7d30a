"""What the keyed datasets share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kedro.io import DatasetError

from flatout.engine.files.content_key import ContentKey

logger = logging.getLogger(__name__)


def log_changes(name: str, key: ContentKey, stored: ContentKey | None) -> None:
    """Say why `name` is made (again)."""
    if stored is None:
        logger.info("%s: not there yet, making it", name)
    else:
        changes = (
            "; ".join(key.changes_since(stored)) or "files that are missing or changed"
        )
        logger.info("%s: made again, because of %s", name, changes)


@contextmanager
def dataset_errors() -> Iterator[None]:
    """Errors of the engine as Kedro's, with the same text and no wrapping around it."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        raise DatasetError(str(error)) from error
