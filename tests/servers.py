"""Helpers for commands that serve a web page."""

import os
import random
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

CHANCE = random.SystemRandom()
"""A generator with its own seed. Libraries seed Python's generator, so that all
processes would choose the same port."""


def free_port() -> int:
    """Return a free port below the ephemeral ones, as Kedro-Viz accepts no others."""
    for port in CHANCE.sample(range(20_000, 30_000), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("no free port")


@contextmanager
def serving(handler: Any) -> Iterator[str]:
    """Yield the URL of a server with this request handler."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def wait_for(url: str, process, log: Path) -> bytes:
    """Wait until the page responds, and return its content."""
    for _ in range(1200):
        with suppress(OSError), urllib.request.urlopen(url, timeout=2) as page:
            return page.read()
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def end_all(leader: int) -> None:
    """Kill `leader` and its children, including MLflow's server in another session."""
    with suppress(psutil.NoSuchProcess):
        found = psutil.Process(leader)
        for one in (*found.children(recursive=True), found):
            one.kill()


def of_session(leader: int) -> list[psutil.Process]:
    """Return processes that `leader` and its children started, including orphaned
    ones."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == leader:
                found.append(process)
    return [one for one in found if one.status() != psutil.STATUS_ZOMBIE]


def listening(leader: int) -> set[tuple[str, int]]:
    """Return the addresses and ports on which the session accepts connections."""
    connections = []
    children = psutil.Process(leader).children(recursive=True)
    for one in {*of_session(leader), *children}:
        with suppress(psutil.NoSuchProcess):  # a process that has just ended
            connections += one.net_connections("tcp")
    taking = [c.laddr for c in connections if c.status == psutil.CONN_LISTEN]
    return {(address.ip, address.port) for address in taking}
