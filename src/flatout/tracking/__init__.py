"""Tracking of runs in MLflow, at no cost for the training.

The engine appends one JSON line per log point, the hooks write `run.json`. The program
`python -m flatout.tracking FOLDER` follows both and sends new data to MLflow. Data that
an unreachable, slow or locked store did not accept stay in the folder; `kedro flatout
sync` sends them later with the same code.

The way of a figure: `Recorder.log` -> `MetricsFile.write` (train_metrics.jsonl) ->
`Tail.new` -> `mlflow_metrics` -> `MlflowSender.send`. Figures of reports and trials:
`record_node_outputs` (run.json) -> `MlflowSender.end`.
"""

from flatout.tracking.record import RunFolder, RunRecord, begin

__all__ = ["RunFolder", "RunRecord", "begin"]
