"""`python -m flatout.engine.launch.agent FOLDER ARGUMENTS`: starts a machine's ranks.

The same as `python -m torch.distributed.run ARGUMENTS`, but for three things: failures
are left as FOLDER/failures.json, it ends when the process that started it is gone, and
a SIGTERM or Ctrl-C is for that process and the ranks to answer: a scheduler sends it to
all of them, and ranks that save must not be cut short from here.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

from flatout.engine.machine.signals import STOPPING, die_with_parent

FAILURES = "failures.json"
SIGNALS_OPTION = "--signals-to-handle"


def main(folder: Path, arguments: list[str]) -> int:
    die_with_parent()
    for signum in STOPPING:  # a handler: ranks would inherit SIG_IGN
        signal.signal(signum, lambda *_: None)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, parse_args, run

    if SIGNALS_OPTION in get_args_parser().format_help():  # not in PyTorch 2.11
        arguments = [f"{SIGNALS_OPTION}=SIGHUP,SIGQUIT", *arguments]
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


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2:]))
