"""Datasets that load log sessions as raw rows, read from a log or generated."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kedro.io import DatasetError

from flatout.datasets._entry import ReadOnlyDataset
from flatout.engine.data.sessions.grouping import LogColumns, Part, SessionFilter
from flatout.engine.data.sessions.log_sessions import LogSessions as _LogSessions
from flatout.engine.data.sessions.synthetic import FORMAT_VERSION, synthetic_sessions
from flatout.places import project_path


class LogSessions(ReadOnlyDataset):
    """The sessions of a log, as read-only rows with the columns `session`, `text` (log
    keys separated by spaces) and `label`.

    A CSV, JSON lines, Parquet or Arrow file must have one row per log line. Its rows
    are grouped by session. The `*_structured.csv` files of loghub can be used
    unchanged. Any other file must have one session per line, with log keys separated by
    spaces. Lines that cannot be used are stored in `rejected_rows`.

    Labels come from `label_filepath` (a file with the columns session and label) or
    from `label_column`. If `abnormal_filepath` is given, its sessions are abnormal and
    those of `filepath` are normal. `part: train` selects the fraction `train_share` of
    the sessions and leaves out the abnormal ones among them. `part: rest` selects the
    sessions outside this fraction.
    """

    content = "sessions of a log"

    def __init__(  # noqa: PLR0913 - all are catalog options
        self,
        *,
        filepath: str,
        abnormal_filepath: str | None = None,
        label_filepath: str | None = None,
        key_column: str = LogColumns.key,
        session_column: str = LogColumns.session,
        session_pattern: str | None = LogColumns.pattern,
        label_column: str | None = None,
        part: Part = "all",
        train_share: float = SessionFilter.share,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        _check_pattern(session_pattern)
        self._filepath = filepath
        self._reader = _LogSessions(
            Path(filepath),
            abnormal=Path(abnormal_filepath) if abnormal_filepath else None,
            labels=Path(project_path(label_filepath)) if label_filepath else None,
            columns=LogColumns(
                key_column, session_column, session_pattern, label_column
            ),
            selection=_session_filter(part, train_share),
        )
        self.metadata = metadata

    def load(self) -> Any:
        """Return a reader that streams the sessions of the log."""
        return self._reader

    def _exists(self) -> bool:
        return Path(self._filepath).exists()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": self._filepath, "reader": self._reader}


class SyntheticSessions(ReadOnlyDataset):
    """Generated log sessions, some of them abnormal. They are read-only and load as an
    Arrow table with the columns `session`, `text` and `label`."""

    content = "synthetic sessions"

    def __init__(
        self,
        *,
        sessions: int = 4_000,
        seed: int = 0,
        part: Part = "all",
        train_share: float = SessionFilter.share,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        self._sessions, self._seed = sessions, seed
        self._session_filter = _session_filter(part, train_share)
        self.metadata = metadata

    def load(self) -> Any:
        """Generate the sessions from the seed, and return them as an Arrow table."""
        return synthetic_sessions(self._sessions, self._seed, self._session_filter)

    def _describe(self) -> dict[str, Any]:
        known = {"sessions": self._sessions, "seed": self._seed}
        known["deal"] = self._session_filter
        return {"name": self.content, **known, "format": FORMAT_VERSION}


def _check_pattern(pattern: str | None) -> None:
    try:
        re.compile(pattern or "")
    except (re.error, TypeError) as error:
        raise DatasetError(
            f"session_pattern: {pattern!r} is not a regular expression ({error}): put "
            "it in quotes, and a backslash before a character that is meant literally"
        ) from error


def _session_filter(part: Part, share: float) -> SessionFilter:
    if part not in ("all", "train", "rest"):
        raise DatasetError(f"part must be all, train or rest; got {part!r}")
    if not 0 < share < 1:
        raise DatasetError(f"train_share must be between 0 and 1; got {share}")
    return SessionFilter(part, share)
