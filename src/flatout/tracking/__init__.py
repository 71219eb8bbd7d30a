"""Tracking of runs in MLflow, without slowing down training.

The engine appends one JSON line per log point, and the hooks write `run.json`. The
program `python -m flatout.tracking FOLDER` follows both files and sends new data to
MLflow. If the store is unreachable, slow or locked, the data stay in the folder. `kedro
flatout sync` sends them later with the same code.

A metric passes through `Recorder.log`, `MetricsFile.write` (train_metrics.jsonl),
`Tail.new`, `mlflow_metrics` and `MlflowSender.send`. Results in reports and trials pass
through `record_node_outputs` (run.json) and `MlflowSender.end`.
"""

from flatout.tracking.record import RunFolder, RunRecord, begin

__all__ = ["RunFolder", "RunRecord", "begin"]
