"""A saved text model as MLflow has it, without torch: its folder is linked, not loaded.

`mlflow.transformers` writes the same files, for a model that is in memory. It imports
transformers' pipelines for it, and loads what it has written once more.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from mlflow import pyfunc
from mlflow.models import Model, infer_signature
from mlflow.models.model import MLMODEL_FILE_NAME
from mlflow.models.utils import _save_example
from mlflow.transformers.flavor_config import FlavorKey
from mlflow.transformers.model_io import (
    _COMPONENTS_BINARY_DIR_NAME,
    _MODEL_BINARY_FILE_NAME,
)
from mlflow.utils.environment import (
    _CONDA_ENV_FILE_NAME,
    _PYTHON_ENV_FILE_NAME,
    _REQUIREMENTS_FILE_NAME,
    _mlflow_conda_env,
    _PythonEnv,
)
from mlflow.utils.file_utils import get_total_file_size

from flatout.tracking.models import TextModel

REQUIRED = ("mlflow", "torch", "transformers", "tokenizers", "safetensors", "numpy")
FLAVOR = "mlflow.transformers"
OF_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "*.model",
)


def log_text_model(found: TextModel) -> str:
    """Log to the active run, with signature, input example and pinned requirements.
    Returns the model's URI."""
    logged = Model.log(
        artifact_path=None,
        name="model",
        flavor=_Flavor,
        flavor_name=FLAVOR,
        found=found,
        validate_serving_input=False,  # it would load the model
    )
    return str(logged.model_uri)


class _Flavor:
    """What MLflow calls to write a model."""

    @staticmethod
    def save_model(path: str, mlflow_model: Model, found: TextModel, **_: Any) -> None:
        folder = Path(path)
        folder.mkdir(parents=True)
        mlflow_model.signature = infer_signature([found.example], _output(found))
        if found.loads:
            _save_example(mlflow_model, [found.example], path)
        mlflow_model.add_flavor(
            "transformers",
            transformers_version=version("transformers"),
            code=None,
            **_flavor(found),
        )
        pyfunc.add_to_model(
            mlflow_model,
            loader_module=FLAVOR,
            conda_env=_CONDA_ENV_FILE_NAME,
            python_env=_PYTHON_ENV_FILE_NAME,
        )
        _link(found.folder, folder)
        mlflow_model.model_size_bytes = get_total_file_size(path)
        mlflow_model.save(str(folder / MLMODEL_FILE_NAME))
        _write_requirements(folder)


def _flavor(found: TextModel) -> dict[str, Any]:
    """As `mlflow.transformers.flavor_config` has it of a pipeline."""
    return {
        FlavorKey.TASK: found.task,
        FlavorKey.INSTANCE_TYPE: found.task.title().replace("-", "") + "Pipeline",
        FlavorKey.TORCH_DTYPE: found.dtype,
        FlavorKey.MODEL_TYPE: found.model_class,
        FlavorKey.MODEL_NAME: found.source,
        FlavorKey.MODEL_BINARY: _MODEL_BINARY_FILE_NAME,
        FlavorKey.COMPONENTS: [FlavorKey.TOKENIZER],
        FlavorKey.COMPONENT_TYPE.format(FlavorKey.TOKENIZER): found.tokenizer_class,
    }


def _output(found: TextModel) -> Any:
    import pandas as pd

    if found.task == "text-classification":
        return pd.DataFrame({"label": ["name"], "score": [0.5]})
    return [found.example]


def _link(source: Path, target: Path) -> None:
    """Links in place of copies: MLflow copies what it is given to where it keeps it."""
    model = target / _MODEL_BINARY_FILE_NAME
    tokenizer = target / _COMPONENTS_BINARY_DIR_NAME / FlavorKey.TOKENIZER
    for folder in (model, tokenizer):
        folder.mkdir(parents=True)
    for file in (f for f in source.iterdir() if f.is_file()):
        of_tokenizer = any(map(file.match, OF_TOKENIZER))
        (tokenizer if of_tokenizer else model).joinpath(file.name).symlink_to(
            file.absolute()
        )


def _write_requirements(folder: Path) -> None:
    """Left to itself MLflow imports what is not installed to find these; given them, it
    reads the metadata of all packages to see whether they are."""
    pinned = [f"{name}=={version(name)}" for name in REQUIRED]
    conda = _mlflow_conda_env(additional_pip_deps=pinned, install_mlflow=False)
    (folder / _CONDA_ENV_FILE_NAME).write_text(
        yaml.safe_dump(conda, default_flow_style=False), encoding="utf-8"
    )
    text = "\n".join(pinned)
    (folder / _REQUIREMENTS_FILE_NAME).write_text(text, encoding="utf-8")
    _PythonEnv.current().to_yaml(str(folder / _PYTHON_ENV_FILE_NAME))
