"""Around the benchmark: its trials as runs of MLflow, and a look at tuned settings."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

import mlflow
from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.pipeline.node import Node
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from flatout.engine.settings import Settings, parse_settings
from flatout.tracking.store import one_line

logger = logging.getLogger(__name__)

TAGS = ("mode", "kind", "status", "note", "log")
IDENTITY = ("trial_id", "key")


class TrialRuns:
    """Every trial a nested run under the benchmark's own. Where the store does not
    answer, the benchmark goes on: all is in its table."""

    @hook_impl
    def after_node_run(self, node: Node, outputs: dict[str, Any]) -> None:
        active = mlflow.active_run()
        if active is None:
            return
        try:
            if node.name == "run_trials":
                _log_trials(active.info, outputs["benchmark_trials"])
                _log_picks(active.info.run_id, outputs["benchmark_summary"])
            elif node.name == "show_benchmark":
                text = outputs["benchmark_report"]
                MlflowClient().log_text(active.info.run_id, text, "benchmark_report.md")
        except Exception as error:  # tracking never ends a run
            logger.warning(
                "MLflow does not have all trials (%s); benchmark_trials.csv has",
                one_line(error),
            )


def _log_trials(parent: Any, trials: Any) -> None:
    client, now_ms = MlflowClient(), int(time.time() * 1000)
    for trial in trials.to_dict("records"):
        elapsed_ms = int(1000 * (trial["elapsed_s"] or 0))
        run = client.create_run(
            parent.experiment_id,
            start_time=now_ms - elapsed_ms,
            run_name=_trial_name(trial),
            tags={MLFLOW_PARENT_RUN_ID: parent.run_id},
        )
        metrics, params, tags = _columns(trial, now_ms)
        client.log_batch(run.info.run_id, metrics=metrics, params=params, tags=tags)
        state = "FINISHED" if trial["status"] == "ok" else "FAILED"
        client.set_terminated(run.info.run_id, state, end_time=now_ms)


def _trial_name(trial: Mapping[str, Any]) -> str:
    """`003 packed/8192 b32 w0`."""
    return (
        f"{trial['trial_id']} {trial['strategy']}/{trial['token_budget']} "
        f"b{trial['global_batch_size']} w{trial['num_workers']}"
    )


def _columns(
    trial: Mapping[str, Any], now_ms: int
) -> tuple[list[Metric], list[Param], list[RunTag]]:
    """Measured columns are metrics, what was set is parameters, the rest tags."""
    metrics, params, tags = [], [], []
    for name, value in trial.items():
        if _missing(value):
            continue
        if name in TAGS or name in IDENTITY:
            tags.append(RunTag(name, str(value)[:5000]))
        elif isinstance(value, float):
            metrics.append(Metric(name, value, now_ms, 0))
        else:
            params.append(Param(name, str(value)))
    return metrics, params, tags


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _log_picks(run_id: str, summary: Mapping[str, Any]) -> None:
    """The recommendation, as metrics and tags of the parent run."""
    chosen = summary["picks"]["recommended"]
    client = MlflowClient()
    if chosen:
        client.log_metric(run_id, "samples_per_s", chosen["samples_per_s"])
        client.set_tag(run_id, "recommended", _trial_name(chosen))
    if summary["verdict"]:
        client.set_tag(run_id, "bound_by", summary["verdict"]["bound"])


class TunedHooks:
    """Warns where tuned settings were measured on something else than this."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        self._settings = parse_settings(context.config_loader["parameters"])

    @hook_impl
    def before_node_run(self, node: Node, inputs: dict[str, Any]) -> None:
        if node.name != "train_model" or not self._settings.tuned:
            return
        differences = tuned_mismatches(self._settings, inputs["train_tokens"])
        if differences:
            logger.warning(
                "The tuned parameters were measured with another %s. They still train "
                "right, but may be slow: kedro run --pipelines=benchmark measures anew",
                "; another ".join(differences),
            )


def tuned_mismatches(settings: Settings, train_tokens: Any) -> list[str]:
    """What differs between where the tuned parameters were measured and here."""
    # They import torch, as training is about to.
    from flatout.engine.environment import device_name
    from flatout.engine.job_files import token_key
    from flatout.engine.launch import resolve_processes
    from flatout.engine.recommend import mismatches, provenance
    from flatout.engine.tokens import TokenRows

    here = provenance(
        settings,
        device_name(),
        resolve_processes(settings.train.distributed),
        token_key(TokenRows.from_dataset(train_tokens)),
    )
    return mismatches(settings.tuned, here)
