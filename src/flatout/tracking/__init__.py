"""Runs in MLflow that cost training nothing.

The engine appends a JSON line a log point, the hooks write `run.json`. The program
`python -m flatout.tracking FOLDER` follows both and sends what is new to MLflow. What a
dead, slow or locked store did not take waits in the folder; `kedro flatout sync` runs
the same code later.
"""

from flatout.tracking.record import RunFolder, RunRecord, begin, run_folders
from flatout.tracking.store import one_line, prepare

__all__ = [
    "RunFolder",
    "RunRecord",
    "begin",
    "one_line",
    "prepare",
    "run_folders",
]
