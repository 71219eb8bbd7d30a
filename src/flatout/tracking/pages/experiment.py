"""The list of runs in MLflow: the menu of trainings, and a view with speed first."""

from __future__ import annotations

import json
import logging

from mlflow import MlflowClient
from mlflow.entities import Experiment

logger = logging.getLogger(__name__)

KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Without a kind MLflow opens an experiment as one of prompts and traces."""
MENU = "workflowType=machine_learning"
"""Of an address: the menu of trainings, whatever the browser showed last."""
VIEW = "flatout"
VIEW_NAME = "Speed first"
VIEW_SINCE_MS = 1_795_500_000_000
DIFFERENCES = "flatout-differences"
COLUMNS = (
    "metrics.`train_samples_per_second`",
    "tags.`samples_per_s`",
    "tags.`step_ms_p50`",
    "tags.`loader_wait_pct`",
    "tags.`peak_reserved_gib`",
    "params.`train.learning_rate`",
    "params.`train.global_batch_size`",
    "metrics.`validation_loss`",
    "metrics.`test_accuracy`",
    "tags.`device`",
)
CURVES = {
    "speed": (
        "train_samples_per_second",
        "train_tokens_per_second",
        "loader_wait_pct",
    ),
    "learning": (
        "train_loss",
        "learning_rate",
        "grad_norm",
        "validation_loss",
        "validation_accuracy",
    ),
}
"""Charts by section; what has none here follows in MLflow's own."""


def describe(client: MlflowClient, experiment: Experiment) -> None:
    """Give it its kind and the view, where it lacks them. What a store refuses of it
    costs no run."""
    wanted = {**KIND, f"mlflow.sharedViewState.{VIEW}": view()}
    try:
        for name, text in wanted.items():
            if name not in experiment.tags:
                client.set_experiment_tag(experiment.experiment_id, name, text)
    except Exception as error:
        logger.debug("the experiment has no view: %s", error)


def runs_page(experiment_id: str) -> str:
    """Address below the server's, with the view."""
    return f"#/experiments/{experiment_id}/runs?{MENU}&viewStateShareKey={VIEW}"


def view() -> str:
    """As MLflow's pages keep a saved view in a tag of the experiment."""
    state = {
        "isAccordionReordered": True,  # else MLflow sorts sections by name
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "selectedColumns": COLUMNS,
        "compareRunCharts": _charts(),
        "compareRunSections": _sections(),
    }
    times = {"createdAt": VIEW_SINCE_MS, "updatedAt": VIEW_SINCE_MS}
    return json.dumps({"name": VIEW_NAME, **times, "state": json.dumps(state)})


def _charts() -> list[dict[str, object]]:
    curves = [
        {
            "uuid": f"flatout-{metric}",
            "type": "LINE",
            "metricSectionId": f"flatout-{section}",
            "metricKey": metric,
            "displayName": metric,
            "runsCountToCompare": 10,
            "deleted": False,
            "isGenerated": False,
            "lineSmoothness": 0,
            "xAxisScaleType": "linear",
            "scaleType": "linear",
            "range": {},
            "xAxisKey": "step",
            "selectedXAxisMetricKey": "",
            "yAxisKey": "metric",
            "yAxisExpressions": [],
            "ignoreOutliers": False,
            "useGlobalXaxisKey": True,
            "useGlobalLineSmoothing": True,
        }
        for section, metrics in CURVES.items()
        for metric in metrics
    ]
    differences = {
        "uuid": DIFFERENCES,
        "type": "DIFFERENCE",
        "metricSectionId": DIFFERENCES,
        "chartName": "what differs",
        "compareGroups": ["Model metrics", "Parameters", "Tags"],
        "showChangeFromBaseline": True,
        "showDifferencesOnly": True,
        "baselineColumnUuid": "",
        "runsCountToCompare": 10,
        "deleted": False,
        "isGenerated": False,
    }
    return [*curves, differences]


def _sections() -> list[dict[str, object]]:
    names = {"speed": "Speed", "differences": "What differs", "learning": "Learning"}
    own = {f"flatout-{key}": name for key, name in names.items()}
    mlflows = {"flatout-model": "Model metrics", "flatout-system": "System metrics"}
    return [
        {
            "uuid": key,
            "name": name,
            "display": key in own,
            "isReordered": False,
            "deleted": False,
            "isGenerated": False,
            "columns": 1 if key == DIFFERENCES else 3,
        }
        for key, name in {**own, **mlflows}.items()
    ]
