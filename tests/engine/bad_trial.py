"""A trial that fails in various ways: `python -m tests.engine.bad_trial FOLDER`."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from flatout.engine.benchmark.trials.trial import serve


def run(spec, open_job, folder):
    behaviour = spec.options["behaviour"]
    if behaviour == "hang":
        time.sleep(600)
    if behaviour == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    if behaviour == "leave":
        os._exit(3)
    if behaviour == "memory":
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if behaviour == "fault":
        raise KeyError("nobody")
    if behaviour == "grow":
        kept = []
        while True:
            kept.append(b"x" * 10_000_000)
            time.sleep(0.02)
    return {"samples_per_s": 5.0, "note": "fine"}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    rank = os.environ.get("RANK", "0")
    (folder / f"{rank}.pid").write_text(json.dumps(os.getpid()))
    raise SystemExit(serve(folder, run))
