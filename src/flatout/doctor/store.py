"""The tracking store: there, writable, and answering within seconds."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from flatout.engine.diagnosis.finding import Finding, within
from flatout.engine.files.writable import ELSEWHERE, first_fault
from flatout.tracking import one_line
from flatout.tracking.store import LOGIN

CHECK = "tracking store"
LIMIT_S = 3.0
LOCK_WAIT_S = 1.0
LATER = "training goes on without it; `kedro flatout sync` sends its points later"


def tracking_store(
    uri: str | None, limit_s: float = LIMIT_S, *, needed: bool = False
) -> Finding:
    """A SQLite file, or a server; other kinds are named and not asked. `needed`: a run
    is refused where this user cannot write it."""
    if not uri:
        fix = "set server.mlflow_tracking_uri in conf/base/mlflow.yml"
        return Finding(CHECK, "warn", f"none is named: {LATER}", fix)
    if uri.startswith("sqlite:///"):
        return sqlite_file(Path(uri.removeprefix("sqlite:///")), needed)
    if uri.startswith(("http://", "https://")):
        return server(uri, limit_s)
    if "://" not in uri or uri.startswith("file:"):
        text = f"{uri} is a folder, which MLflow takes no more: {LATER}"
        return Finding(CHECK, "warn", text, "use sqlite:///.../mlflow.db, or a server")
    return Finding(CHECK, "ok", f"{uri}: not asked")


def sqlite_file(file: Path, needed: bool = False) -> Finding:
    if fault := first_fault([file]):
        status, text = ("fail", fault) if needed else ("warn", f"{fault}. {LATER}")
        return Finding(CHECK, status, text, ELSEWHERE)
    if not file.exists():
        return Finding(CHECK, "ok", f"{file} will be made by the first run")
    try:
        with closing(sqlite3.connect(file, timeout=LOCK_WAIT_S)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            text = f"{file} is locked by another program: {LATER}"
            return Finding(CHECK, "warn", text, f"end that program: lsof {file}")
        return Finding(CHECK, "warn", f"{file}: {error}. {LATER}", ELSEWHERE)
    except sqlite3.DatabaseError as error:
        fix = f"move it away: mv {file} {file}.broken"
        return Finding(CHECK, "warn", f"{file}: {error}. {LATER}", fix)
    return Finding(CHECK, "ok", f"{file} can be written to")


def server(uri: str, limit_s: float = LIMIT_S) -> Finding:
    """One question with the user's own login, as a run would ask."""
    try:
        within(limit_s, lambda: MlflowClient(uri).search_experiments(max_results=1))
    except TimeoutError:
        text = f"{uri} gave no answer within {limit_s:g} s: {LATER}"
        return Finding(CHECK, "warn", text, "is the server up, and the address right?")
    except MlflowException as error:
        return _refused(uri, one_line(error))
    return Finding(CHECK, "ok", f"{uri} answers")


def _refused(uri: str, text: str) -> Finding:
    if "error code 401" in text:
        return Finding(CHECK, "warn", f"{uri} asks for a login (401): {LATER}", LOGIN)
    if "error code 403" in text:
        finding = f"{uri} knows this login and lets it see nothing (403): {LATER}"
        return Finding(CHECK, "warn", finding, LOGIN)
    fix = "is the server up, and the address right?"
    return Finding(CHECK, "warn", f"{uri}: {text}. {LATER}", fix)
