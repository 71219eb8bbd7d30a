"""The Optuna storage of a sweep's trials."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock, Timeout
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from sqlalchemy import create_engine, inspect
from sqlalchemy.exc import SQLAlchemyError

from flatout.engine.parameters import SettingsError, SweepSettings
from flatout.engine.parameters.faults import first_line, some_of
from flatout.engine.parameters.secrets import without_password

FAULTS = (StorageInternalError, SQLAlchemyError)
"""Errors raised if a storage is unreachable."""
MISSED_HEARTBEATS = 3
SQLITE = "sqlite:///"
SQLITE_TIMEOUT_S = 60.0

Stale = Callable[[Any, Any], None]
"""A function that is called with the study and a trial whose machine has died."""


class StorageError(RuntimeError):
    """Raised if a storage is unreachable or in use by another command."""

    exit_code = 1


class FileStorage(RDBStorage):  # type: ignore[misc]
    """SQLite storage for one process. A lock prevents two threads from starting the
    same trial."""

    def __init__(self, file: Path) -> None:
        """Raises ValueError if the file is the database of another program."""
        tables = inspect(create_engine(f"{SQLITE}{file.absolute()}")).get_table_names()
        if tables and "studies" not in tables:
            raise ValueError(f"another program's tables: {some_of(tables)}")
        self._turn = threading.Lock()
        patient = {"connect_args": {"timeout": SQLITE_TIMEOUT_S}}
        super().__init__(f"{SQLITE}{file.absolute()}", engine_kwargs=patient)

    def set_trial_state_values(self, *given: Any, **named: Any) -> bool:
        with self._turn:
            return bool(super().set_trial_state_values(*given, **named))


class ServerStorage(RDBStorage):  # type: ignore[misc]
    """Storage on a database server. Heartbeats continue after a short outage."""

    def record_heartbeat(self, trial_id: int) -> None:
        with suppress(*FAULTS):
            super().record_heartbeat(trial_id)


def database_file(place: str) -> Path | None:
    """Return the SQLite file of `sweep.storage`, or None for the URL of a server."""
    if place.startswith(SQLITE):
        return Path(place.removeprefix(SQLITE))
    return None if "://" in place else Path(place)


@contextmanager
def opened(options: SweepSettings, stale: Stale) -> Iterator[Any]:
    """Context manager that opens the Optuna storage `sweep.storage`. `stale` is called
    for trials of machines that have died. A file is locked, so that only this process
    uses it. Raises SettingsError if the storage cannot be opened, and StorageError if
    it is in use or fails inside the block."""
    place = options.storage
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with ExitStack() as held:
        try:
            storage = _open(options, stale, held)
        except (SettingsError, StorageError):
            raise
        except (*FAULTS, ImportError, ValueError, OSError, RuntimeError) as error:
            raise SettingsError(
                f"sweep.storage: {without_password(place)} cannot be opened: "
                f"{_remedy(place, error)} ({_cause(error)})"
            ) from None
        try:
            yield storage
        except FAULTS as error:
            raise StorageError(
                f"sweep.storage {without_password(place)} is gone ({_cause(error)}). "
                "The checkpoints of the trials are in sweep.folder; when the storage "
                "is back, the same command resumes"
            ) from None


def _open(options: SweepSettings, stale: Stale, held: ExitStack) -> RDBStorage:
    """Open the storage. A database file is locked until `held` is closed."""
    file = database_file(options.storage)
    if file is None:
        return _server(options, stale)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        held.enter_context(FileLock(f"{file}.lock").acquire(timeout=0))
    except Timeout:
        raise StorageError(
            f"sweep.storage: another command works with {file}. Several machines or "
            "commands share the database of a server: "
            "sweep.storage=postgresql://user@host/name"
        ) from None
    return FileStorage(file)


def _server(options: SweepSettings, stale: Stale) -> RDBStorage:
    beat_s = max(1, round(options.heartbeat_s))
    # If several machines created the tables at the same time, some would fail.
    with FileLock(Path(options.folder, ".tables.lock")), warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return ServerStorage(
            options.storage,
            engine_kwargs={"pool_pre_ping": True},
            heartbeat_interval=beat_s,
            grace_period=MISSED_HEARTBEATS * beat_s,
            heartbeat_stale_trial_callback=stale,
        )


def _remedy(place: str, error: BaseException) -> str:
    if database_file(place) is not None:
        return "name a database of Optuna, or a new file in a folder that is writable"
    kind = "mysql" if place.startswith(("mysql", "mariadb")) else "postgresql"
    if not place.startswith(("mysql", "mariadb", "postgres")):
        return "name a file, or a database of PostgreSQL, MySQL or MariaDB"
    if isinstance(error, ImportError):
        return f"install its driver (pip install 'flatout[{kind}]')"
    return "is it running, and are name, user and password right?"


def _cause(error: BaseException) -> str:
    return without_password(first_line(error.__cause__ or error))
