"""A saved model in MLflow's format, with flatout's code and pinned requirements."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import flatout

REQUIRED = (
    *("mlflow", "numpy", "pandas", "psutil", "pydantic"),
    *("safetensors", "tokenizers", "torch", "transformers"),
)


def log_pyfunc(
    module: str, folder: Path, run_id: str, also: Sequence[str] = (), **options: Any
) -> str:
    """Log `folder`, which `_load_pyfunc` of the module loads, to the run. `also`:
    further packages that it needs; `options`: those of MLflow's Model.log. Return the
    model's URI."""
    import mlflow.pyfunc
    from mlflow.models import Model

    logged = Model.log(
        artifact_path=None,
        flavor=mlflow.pyfunc,
        name="model",
        run_id=run_id,
        loader_module=module,
        data_path=str(folder),
        code_paths=[str(Path(flatout.__file__).parent)],
        # Without this list MLflow would import packages that may not be installed.
        pip_requirements=[f"{name}=={version(name)}" for name in (*REQUIRED, *also)],
        **options,
    )
    return str(logged.model_uri)
