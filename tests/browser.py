"""Headless Chromium, controlled through its debugging pipe. It is used for many
pages."""

import fcntl
import itertools
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",  # needed as root, in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--window-size=1600,1400",
    "--remote-debugging-pipe",
)


class Browser:
    """A browser tab. Chromium reads commands from descriptor 3 and replies on 4."""

    def __init__(self, profile: Path) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        theirs = [commands, answers, _high(commands), _high(answers)]
        command = [CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        self._pid = os.posix_spawn(
            CHROMIUM, command, os.environ, file_actions=_streams(*theirs[2:])
        )
        for descriptor in theirs:
            os.close(descriptor)
        self._numbers, self._buffer, self._session = itertools.count(1), b"", {}
        targets = self._call("Target.getTargets")["targetInfos"]
        [page] = [target for target in targets if target["type"] == "page"]
        attach = {"targetId": page["targetId"], "flatten": True}
        attached = self._call("Target.attachToTarget", **attach)
        self._session = {"sessionId": attached["sessionId"]}

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def value(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        asked = {"expression": script, "returnByValue": True}
        return self._call("Runtime.evaluate", **asked)["result"].get("value")

    def shows(self, script: str, limit_s: float = 60) -> bool:
        """Return whether the expression becomes true within `limit_s` seconds."""
        end = time.monotonic() + limit_s
        while not self.value(script):
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True

    def close(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._commands)
        os.close(self._answers)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        call = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._commands, json.dumps(call).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    def _message(self) -> dict[str, Any]:
        """Return the next reply or event."""
        while b"\0" not in self._buffer:
            part = os.read(self._answers, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)


def _high(descriptor: int) -> int:
    """Return a copy of the descriptor that is neither 3 nor 4."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)


def _streams(commands: int, answers: int) -> list[tuple]:
    """Map commands to descriptor 3 and replies to 4, and discard other output."""
    quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (1, 2)]
    moved = [(os.POSIX_SPAWN_DUP2, commands, 3), (os.POSIX_SPAWN_DUP2, answers, 4)]
    return [*quiet, *moved]
