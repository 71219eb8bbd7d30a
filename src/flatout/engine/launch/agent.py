"""Start the ranks with `python -m flatout.engine.launch.agent FOLDER CONFIG MODULE`.

The agent uses PyTorch's elastic launcher to run `python -m MODULE FOLDER` in each rank.
CONFIG contains fields of LaunchConfig as JSON. The failures of ranks are written to
FOLDER/failures.json. The agent exits when the process that started it has ended. It
ignores SIGTERM and Ctrl-C, because it would otherwise kill ranks that are still saving
a checkpoint. The parent process and the ranks handle these signals.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from flatout.engine.machine.signals import STOPPING, die_with_parent

FAILURES = "failures.json"
SHUTDOWN_S = 10
"""If a rank has died, the other ranks are killed after this many seconds."""
ONE_MACHINE = {"min_nodes": 1, "max_nodes": 1, "rdzv_backend": "c10d"}
ONE_MACHINE |= {"rdzv_endpoint": "localhost:0", "run_id": "flatout"}


def command(folder: Path, module: str, config: dict[str, Any]) -> list[str]:
    """Return the command that starts an agent. `config` contains `nproc_per_node` and,
    for several machines, the fields that override ONE_MACHINE."""
    agent = [sys.executable, "-m", __name__, str(folder)]
    return [*agent, json.dumps({**ONE_MACHINE, **config}), module]


def main(folder: Path, config: dict[str, Any], module: str) -> int:
    die_with_parent()
    for signum in STOPPING:  # not SIG_IGN, which the ranks would inherit
        signal.signal(signum, lambda *_: None)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The supervisor's error replaces PyTorch's line about each failed rank.
    logging.getLogger("torch.distributed.elastic.multiprocessing").setLevel("CRITICAL")
    (folder / "logs").mkdir(exist_ok=True)
    options = {
        "max_restarts": 0,
        "logs_specs": DefaultLogsSpecs(log_dir=str(folder / "logs")),
        "signals_to_handle": "SIGHUP,SIGQUIT",
        "shutdown_timeout": SHUTDOWN_S,
        **config,
    }
    known = {field.name for field in fields(LaunchConfig)}  # fewer in PyTorch 2.11
    launch = LaunchConfig(**{n: v for n, v in options.items() if n in known})
    try:
        elastic_launch(launch, sys.executable)("-u", "-m", module, str(folder))
    except ChildFailedError as error:
        failures = [_described(rank, f) for rank, f in error.failures.items()]
        (folder / FAILURES).write_text(json.dumps(failures), encoding="utf-8")
        return 1
    return 0


def _described(rank: int, failure: Any) -> dict[str, Any]:
    data = failure.error_file_data.get("message", {})
    data = data if isinstance(data, dict) else {}
    more = data.get("extraInfo", {})
    return {
        "rank": rank,
        "exit_code": failure.exitcode,
        "message": data.get("message", ""),
        "traceback": more.get("py_callstack", ""),
        "time_s": more.get("time_s", failure.timestamp),
    }


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]))
