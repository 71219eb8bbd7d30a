"""Start the tracking program from a run's process, and wait for the program to end."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from flatout.engine.machine.environment import child_environment
from flatout.engine.parameters.secrets import without_password
from flatout.tracking.record import DROPPED, RunFolder, Sent

logger = logging.getLogger(__name__)

LIMIT_S = 20.0
"""Time limit in seconds for a store to accept the remaining data of a finished run."""
FAILING_LIMIT_S = 2.0
"""The same limit for a store that has failed to accept data."""
POLL_S = 0.05


def start(folder: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the tracking program for a run's folder, with additional environment
    variables."""
    return subprocess.Popen(
        [sys.executable, "-m", "flatout.tracking", str(folder)],
        env=child_environment(variables),
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C must only reach this process
    )


class Program:
    """The tracking program that follows `folder`."""

    def __init__(
        self, folder: RunFolder, variables: Mapping[str, str], data_option: str = ""
    ) -> None:
        """`variables` are environment variables such as the store's credentials.
        `data_option` selects the run's data in commands such as `kedro flatout
        sync`."""
        self._folder, self._data_option = folder, data_option
        self._process = start(folder.path, variables)

    def finish(self, limit_s: float = LIMIT_S) -> list[str]:
        """Wait up to `limit_s` seconds for MLflow to receive all data of the finished
        run. Return a list of the data that it has not received."""
        begin_s = responded_s = time.monotonic()
        # When MLflow has all data, the program takes half a second to end. It must have
        # ended before the folder of a dropped run is deleted.
        is_dropped = self._folder.record.status == DROPPED
        while self._process.poll() is None and (
            is_dropped or not self._folder.is_complete()
        ):
            now_s = time.monotonic()
            if not self._sent().fault:
                responded_s = now_s
            if now_s > begin_s + limit_s or now_s > responded_s + FAILING_LIMIT_S:
                self._process.kill()
                self._process.wait()
                break
            time.sleep(POLL_S)
        if missing := self._missing_parts():
            self._warn_missing(missing)
        return missing

    def _sent(self) -> Sent:
        return Sent.load(self._folder.path, self._folder.record.tracking_uri)

    def _missing_parts(self) -> list[str]:
        sent = self._sent()
        if self._folder.is_complete():
            return []
        if sent.run_id is None:
            return ["this run"]
        is_model_left = self._folder.record.model and not sent.model
        model = ["the model"] if is_model_left else []
        return [*model, "the last points and reports of this run"]

    def _warn_missing(self, missing: list[str]) -> None:
        fault = self._sent().fault
        logger.warning(
            "MLflow at %s does not have %s%s. It waits in %s; `kedro flatout sync%s` "
            "sends it.",
            without_password(self._folder.record.tracking_uri),
            " and ".join(missing),
            f" ({fault})" if fault else "",
            self._folder.path,
            self._data_option,
        )


class LevelFormatter(logging.Formatter):
    """Formatter that prefixes messages with their level, except for level INFO."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.WARNING:
            record.message = f"{record.levelname}: {record.message}"
        return super().formatMessage(record)
