"""The best model of a run in MLflow, and the champion among the registered ones."""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Any

import mlflow
import pandas as pd
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.models import infer_signature

logger = logging.getLogger(__name__)

PIPELINE_TASKS = {
    "sequence-classification": "text-classification",
    "regression": "text-classification",
    "causal-lm": "text-generation",
    "masked-lm": "fill-mask",
}
REQUIRED = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
CHAMPION = "champion"


def log_model(model: Any, tokenizer: Any, task: str, example: str) -> str:
    """Log to the active run, with signature, input example and pinned requirements.

    Returns the model's URI, for `mlflow.pyfunc.load_model`.
    """
    import mlflow.transformers

    # They ask for a model card, which a model of one's own does not have yet.
    logging.getLogger("mlflow.transformers").setLevel(logging.ERROR)
    if task == "masked-lm":  # MLflow tries the example, and there must be a gap
        example = f"{tokenizer.mask_token} {example}"
    logged = mlflow.transformers.log_model(
        transformers_model={"model": model, "tokenizer": tokenizer},
        name="model",
        task=PIPELINE_TASKS[task],
        signature=infer_signature([example], _output(task, example)),
        input_example=[example],
        # Left to itself MLflow imports what is not installed to find these.
        pip_requirements=[f"{name}=={version(name)}" for name in REQUIRED],
    )
    return str(logged.model_uri)


def _output(task: str, example: str) -> Any:
    if PIPELINE_TASKS[task] == "text-classification":
        return pd.DataFrame({"label": ["name"], "score": [0.5]})
    return [example]


def register(model_uri: str, name: str, validation_loss: float, token_key: str) -> bool:
    """Make a version of the registered model `name`; True where it is the champion.

    A version displaces the champion where both were validated on the same tokens and
    its validation loss is lower.
    """
    client = MlflowClient()
    logging.getLogger("mlflow.store.model_registry").setLevel(logging.WARNING)
    champion = _champion(name, client)
    made = mlflow.register_model(
        model_uri,
        name,
        tags={"validation_loss": str(validation_loss), "token_key": token_key},
    )
    if champion is not None and not _is_better(made, champion):
        return False
    client.set_registered_model_alias(name, CHAMPION, made.version)
    return True


def _champion(name: str, client: MlflowClient) -> Any | None:
    try:
        return client.get_model_version_by_alias(name, CHAMPION)
    except MlflowException:
        return None


def _is_better(challenger: Any, champion: Any) -> bool:
    new, old = challenger.tags, champion.tags
    if new["token_key"] != old.get("token_key"):
        logger.info(
            "Version %s is not compared with the champion: other tokens",
            challenger.version,
        )
        return False
    return float(new["validation_loss"]) < float(old["validation_loss"])
