"""Tracking of runs in MLflow, without slowing down training.

The engine appends one JSON line per logging step, and the hooks write `run.json`. The
program `python -m flatout.tracking FOLDER` follows both files and sends new data to
MLflow. If the store is unreachable, slow or locked, the data stays in the folder, and
`kedro flatout sync` sends it later with the same code.

A training metric passes through `Recorder.log`, `MetricsFile.write`
(train_metrics.jsonl), `Tail.new`, `mlflow_metrics` and `MlflowSender.send`. The results
of reports and trials pass through `record_node_outputs` (run.json) and
`MlflowSender.end`.
"""

from flatout.tracking.record import RunFolder, RunRecord, begin

__all__ = ["RunFolder", "RunRecord", "begin"]
