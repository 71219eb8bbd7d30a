"""A model of samples of one shape in MLflow: the object of `mlflow.pyfunc.load_model`
converts samples (N, ...) to a table of answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from flatout.tracking.pyfunc import log_pyfunc


class SampleModel:
    """Model with the answers of the pipeline `predict`, without sources and reasons."""

    def __init__(self, model: Any) -> None:
        """`model`: result of `load_pretrained`. Raises ModelError."""
        from flatout.engine.files.calibration import Calibration
        from flatout.engine.parameters import Settings
        from flatout.engine.predict.predictor import Predictor

        known = {"runtime.precision": "fp32"}
        if named := getattr(model.config, "flatout_task", None):
            known["model.task"] = named
        if Calibration.read(model.config.name_or_path).thresholds:
            known["model.label_threshold"] = "auto"
        self._predictor = Predictor(model, None, Settings().changed(known))

    def predict(
        self, samples: npt.NDArray[Any], params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """Return one row per sample: label, score and a probability per class, or a
        value. Samples have the form of the training: the model standardises them."""
        from flatout.engine.predict.predicting import answers_to

        return pd.DataFrame(dict(answers_to(self._predictor, np.asarray(samples))))


def _load_pyfunc(path: str) -> SampleModel:
    """Load a model; MLflow requires this name."""
    from flatout.engine.models.building import load_pretrained

    return SampleModel(load_pretrained(Path(path)))


def log_sample_model(folder: Path, example: Path, run_id: str) -> str:
    """Log a model that `save_pretrained` saved in `folder` to the run, with the array
    (...) in the file `example`. Return the model's URI."""
    from mlflow.models import infer_signature

    one = np.ascontiguousarray(np.load(example)[None])
    answer = _load_pyfunc(str(folder)).predict(one)
    return log_pyfunc(
        __name__,
        folder,
        run_id,
        also=("accelerate", "datasets", "pyarrow", "xxhash"),
        signature=infer_signature(one, answer),
        input_example=one,
    )
