"""`python -m flatout.engine.jobs.agent FOLDER ARGUMENTS`: starts a machine's ranks.

The same as `python -m torch.distributed.run ARGUMENTS`, but for two things: failures
are left as FOLDER/failures.json, and it ends when the process that started it is gone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

FAILURES = "failures.json"


def main(folder: Path, arguments: list[str]) -> int:
    _die_with_parent()
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        failures = [_described(rank, f) for rank, f in error.failures.items()]
        (folder / FAILURES).write_text(json.dumps(failures), encoding="utf-8")
        return 1
    return 0


def _described(rank: int, failure: Any) -> dict[str, Any]:
    data = failure.error_file_data.get("message", {})
    more = data.get("extraInfo", {}) if isinstance(data, dict) else {}
    return {
        "rank": rank,
        "exit_code": failure.exitcode,
        "message": data.get("message", "") if isinstance(data, dict) else "",
        "traceback": more.get("py_callstack", ""),
        "time_s": failure.timestamp,
    }


def _die_with_parent() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)  # the ranks notice in their turn

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2:]))
