"""A trial that says who it is: `python -m tests.engine.fork_trial FOLDER`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from flatout.engine.launch import agent
from flatout.engine.machine.signals import die_with_parent

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    behaviour = (folder / "behaviour").read_text()
    if behaviour == "begin late":  # as one that imports PyTorch
        time.sleep(1)
    die_with_parent()
    if behaviour in ("hang", "begin late"):
        time.sleep(600)
    if behaviour == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    if behaviour == "leave":
        raise SystemExit(3)
    print(f"this is {folder.name}")  # noqa: T201
    facts = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "argv": sys.argv[1:],
        "asked": os.environ["ASKED"],
        "switch": getattr(agent, "switch", 0),
    }
    agent.switch = 1  # type: ignore[attr-defined]
    (folder / "told.json").write_text(json.dumps(facts))
