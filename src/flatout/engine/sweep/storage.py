"""Where the trials of a sweep are kept: an Optuna storage, and what it takes to live
with one that is away for a while."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flatout.engine.parameters import SettingsError
from flatout.engine.parameters.faults import first_line
from flatout.engine.parameters.secrets import without_password

logger = logging.getLogger(__name__)

PATIENCE_S = 600.0
"""How long a storage may be away before the sweep ends."""
RETRY_S = 2.0
OPENINGS = 3

_ADDRESS = re.compile(r"[^/]*@[^/]*/|[^/]+:\d+/|[^/]{2,}:.*@")
"""user@host/, host:port/, user:password@, postgresql:/user@."""

Found = TypeVar("Found")


class StorageError(RuntimeError):
    """A storage that is gone for good, or that holds another sweep."""

    exit_code = 1


def check_place(place: str) -> None:
    """Raises SettingsError for an address that would be taken for a file, or for a kind
    of database that has another name. Without the address: its password may stand
    anywhere."""
    kind, separator, _ = place.partition("://")
    if separator and kind.split("+")[0] == "postgres":
        raise SettingsError(
            "sweep.storage: write postgresql:// in place of postgres://"
        )
    if not separator and _ADDRESS.match(place):
        raise SettingsError(
            "sweep.storage: the address of a database begins with its kind: write "
            "postgresql://user@host/name or mysql+pymysql://user@host/name; a file of "
            "such a name is written with ./ before it"
        )


def open_storage(place: str) -> Any:
    """The optuna storage of `sweep.storage`. Raises SettingsError."""
    import optuna

    from flatout.engine.sweep.journal import open_journal

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        if "://" not in place:
            return open_journal(Path(place))
        return _database(place)
    except SettingsError:
        raise
    except _opening_faults() as error:
        raise SettingsError(
            f"sweep.storage: {without_password(place)} cannot be opened: "
            f"{_remedy(place, error)} ({_cause(error)})"
        ) from None


def _remedy(place: str, error: BaseException) -> str:
    if "://" not in place:
        return "name a file in a folder that this user may write to"
    kind = "mysql" if place.startswith(("mysql", "mariadb")) else "postgresql"
    if not place.startswith(("mysql", "mariadb", "postgres", "sqlite")):
        return "name a file, or a database of PostgreSQL, MySQL or MariaDB"
    if isinstance(error, ImportError):
        return f"install its driver (pip install 'flatout[{kind}]')"
    return "is it running, and are name, user and password right?"


def _database(place: str) -> Any:
    import optuna

    from flatout.engine.sweep.database import PlainRows

    for left in reversed(range(OPENINGS)):
        try:
            rdb = PlainRows(place, engine_kwargs={"pool_pre_ping": True})
            return optuna.storages.get_storage(rdb)
        except _faults():  # also where two machines make its tables in one moment
            if not left:
                raise
            time.sleep(RETRY_S)
    return None


@dataclass
class Patience:
    """With one storage, of all threads that ask it."""

    place: str
    stop: threading.Event
    _silent_s: float | None = None
    """Since when it does not answer."""

    @property
    def is_away(self) -> bool:
        return self._silent_s is not None

    def ask(self, call: Callable[[], Found]) -> Found:
        """What `call` gives, asked again while the storage is away. Raises StorageError
        PATIENCE_S after it was heard last, and at once where `stop` is set."""
        since_s = None
        while True:
            try:
                found = call()
            except _faults() as error:
                # Once: it may still answer those who only read.
                since_s = self._silence(error) if since_s is None else since_s
                if self.stop.is_set() or time.monotonic() - since_s > PATIENCE_S:
                    raise StorageError(_gone(self.place, error)) from None
                self.stop.wait(RETRY_S)
            except Exception:
                self._silent_s = None  # a refusal is an answer
                raise
            else:
                self._silent_s = None
                return found

    def _silence(self, error: BaseException) -> float:
        """When it began; told of once, where it is asked again."""
        begin_s = self._silent_s
        if begin_s is not None:
            return begin_s
        self._silent_s = begin_s = time.monotonic()
        if not self.stop.is_set():
            logger.warning(
                "sweep.storage %s does not answer (%s): trainings go on, and it is "
                "asked again for %.0f minutes",
                without_password(self.place),
                _cause(error),
                PATIENCE_S / 60,
            )
        return begin_s


def _gone(place: str, error: BaseException) -> str:
    return (
        f"sweep.storage {without_password(place)} is gone ({_cause(error)}). "
        "What trials have trained is kept under sweep.folder: the same command goes "
        "on with it when the storage is back"
    )


def _faults() -> tuple[type[BaseException], ...]:
    """What a storage raises that is away: a server, or a folder of the network, which
    may show zeros where another machine has written a line."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    unreadable = (json.JSONDecodeError, UnicodeDecodeError)
    return (StorageInternalError, SQLAlchemyError, OSError, *unreadable)


def _opening_faults() -> tuple[type[BaseException], ...]:
    return (ImportError, ValueError, *_faults())


def _cause(error: BaseException) -> str:
    return without_password(first_line(error.__cause__ or error))
