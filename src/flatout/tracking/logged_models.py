"""Log saved models in MLflow's format. The model that `mlflow.pyfunc.load_model`
returns predicts texts or samples (N, ...). Logging a model imports neither torch nor
transformers, and does not load the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import flatout
from flatout.tracking.record import SavedModel

MULTI_LABEL = "multi_label_classification"
REQUIRED = (
    *("mlflow", "numpy", "pandas", "psutil", "pydantic"),
    *("safetensors", "tokenizers", "torch", "transformers"),
)


class TextModel:
    """A transformers pipeline for `task` with the model in the folder `path`. If the
    folder contains an adapter, the adapter is merged into its base model, which must
    have the same path as during training."""

    def __init__(self, path: str, task: str) -> None:
        import transformers

        from flatout.engine.files.calibration import Calibration

        model: Any = path
        if _has_adapter(path):
            from flatout.engine.models.building import load_pretrained

            model = load_pretrained(Path(path))
        self.pipeline = transformers.pipeline(task, model=model, tokenizer=path)
        self._calibration = Calibration.read(path)
        config = self.pipeline.model.config
        self._thresholds = self._calibration.thresholds or {}
        if not self._thresholds and config.problem_type == MULTI_LABEL:
            self._thresholds = dict.fromkeys(config.id2label.values(), 0.5)
        if self._calibration.temperature != 1:
            self.pipeline.model.register_forward_hook(self._scaled)

    def _scaled(self, model: Any, inputs: Any, outputs: Any) -> Any:
        outputs["logits"] = outputs["logits"] / self._calibration.temperature
        return outputs

    def predict(self, texts: Any, params: dict[str, Any] | None = None) -> Any:
        """Return the pipeline's results for `texts`, which are strings or a table with
        one column. `params` are passed to the pipeline. For classification, the result
        is a table with the label and score of each text."""
        if isinstance(texts, pd.DataFrame):
            texts = texts.iloc[:, 0]
        is_class = self.pipeline.task == "text-classification"
        picks = is_class and not params and self._thresholds
        options = {"top_k": None} if picks else params or {}
        found = self.pipeline([str(text) for text in texts], **options)
        if picks:
            found = [self._by_threshold(one) for one in found]
        return pd.DataFrame(found) if is_class else found

    def _by_threshold(self, answers: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the label and score of one text. `answers` are the label and score of
        each class. With two classes, the second class is chosen if its score is above
        its threshold. In multi-label tasks, all labels above their thresholds are
        chosen, and the returned score is the highest score of all labels."""
        thresholds = self._thresholds
        scores = {one["label"]: one["score"] for one in answers}
        above = [name for name, least in thresholds.items() if scores[name] > least]
        if thresholds.keys() == scores.keys():
            return {"label": ", ".join(above), "score": max(scores.values())}
        chosen = above or [name for name in scores if name not in thresholds]
        return {"label": chosen[0], "score": scores[chosen[0]]}


class SampleModel:
    """A model of arrays or images with the same predictions as the `predict` pipeline.
    The columns for the source of a row and for the reason of a failure are omitted."""

    def __init__(self, model: Any) -> None:
        """`model` was loaded by `load_pretrained`. Raises ModelError if the `predict`
        pipeline does not support this model."""
        from flatout.engine.files.calibration import Calibration
        from flatout.engine.parameters import Settings
        from flatout.engine.predict.predictor import Predictor

        known = {"runtime.precision": "fp32"}
        if named := getattr(model.config, "flatout_task", None):
            known["model.task"] = named
        if Calibration.read(model.config.name_or_path).thresholds:
            known["model.label_threshold"] = "auto"
        self._predictor = Predictor(model, None, Settings().changed(known))
        names = list(getattr(model.config, "input_names", ()))
        self.columns = names if [len(names)] == list(self._predictor.shape) else []
        """The names of the input columns, or [] if a sample is not one table row."""

    def predict(
        self, samples: Any, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """Return a table with one row for each of the `samples` (N, ...). It has the
        label, score and class probabilities, or a value for regression. The samples
        must have the same form as the training data, before normalisation. The columns
        of a DataFrame are found by name. Raises ValueError if samples are unusable."""
        from flatout.engine.predict.predicting import answers_to

        if self.columns and isinstance(samples, pd.DataFrame):
            samples = _numbers(samples[self.columns])
        samples = np.asarray(samples)
        if not len(samples):
            fields = self._predictor.task.answer_fields()
            return pd.DataFrame(columns=[field.name for field in fields])
        self._check(samples)
        return pd.DataFrame(dict(answers_to(self._predictor, samples)))

    def _check(self, samples: Any) -> None:
        """Raise ValueError if `samples` (N, ...) contain NaN or infinite values, or
        differ in shape from the training data."""
        from flatout.engine.arrays.sources import Window

        shape = self._predictor.shape
        if faults := Window("", 0, samples, None).faults_for(shape):
            row, why = min(faults.items())
            raise ValueError(
                f"{len(faults)} of {len(samples)} samples cannot be predicted, the "
                f"first is sample {row} (counted from 0): {why}. A sample must have "
                f"the shape {shape} and only finite numbers: correct these samples, or "
                "leave them out"
            )


def _numbers(table: pd.DataFrame) -> Any:
    """Return the cells of `table` as numbers. Cells that are not numbers become NaN."""
    try:
        return table.to_numpy(float)
    except (TypeError, ValueError):
        return table.apply(pd.to_numeric, errors="coerce").to_numpy(float)


def _load_pyfunc(
    path: str, model_config: dict[str, str] | None = None
) -> TextModel | SampleModel:
    """Load a logged model as a TextModel if `model_config` contains a task, else as a
    SampleModel. MLflow requires this function name."""
    if model_config:
        return TextModel(path, model_config["task"])
    from flatout.engine.models.building import load_pretrained

    return SampleModel(load_pretrained(Path(path)))


def _has_adapter(path: str | Path) -> bool:
    return Path(path, "adapter_config.json").is_file()


def log_text_model(folder: Path, task: str, run_id: str) -> str:
    """Log the saved model and tokenizer in `folder` to the run, and return the model's
    URI. `task` is the name of the transformers pipeline."""
    from mlflow.models import infer_signature

    is_class = task == "text-classification"
    answer = pd.DataFrame({"label": ["name"], "score": [0.5]}) if is_class else None
    return _logged(
        folder,
        run_id,
        also=("accelerate", "peft", "pyarrow") if _has_adapter(folder) else (),
        model_config={"task": task},
        signature=infer_signature(["a text"], answer),
    )


def log_sample_model(saved: SavedModel, run_id: str) -> str:
    """Log a saved model of arrays or images to the run, and return the model's URI. The
    columns of tables are inputs by name. Other inputs are arrays (N, ...)."""
    return _logged(
        Path(saved.folder),
        run_id,
        also=("accelerate", "datasets", "pyarrow", "xxhash"),
        signature=_signature(saved),
    )


def _signature(saved: SavedModel) -> Any:
    """Return the signature of a model of samples, or None for an older record, which
    does not contain the form of the samples."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema, TensorSpec
    from mlflow.types.schema import AnyType

    if saved.shape is None:
        return None
    file = Path(saved.folder, "config.json")
    names = json.loads(file.read_text(encoding="utf-8")).get("input_names", ())
    inputs: list[Any] = [TensorSpec(np.dtype(saved.dtype), (-1, *saved.shape))]
    if [len(names)] == saved.shape:
        inputs = [ColSpec(AnyType(), name) for name in names]
    known = {name: DataType[name] for name in ("string", "float", "double")}
    kinds = {name: known.get(kind, AnyType()) for name, kind in saved.outputs.items()}
    outputs = [ColSpec(kind, name) for name, kind in kinds.items()]
    return ModelSignature(Schema(inputs), Schema(outputs) if outputs else None)


def _logged(folder: Path, run_id: str, also: Sequence[str] = (), **options: Any) -> str:
    """Log the model in `folder` to the run with flatout's code and pinned requirements.
    Return the model's URI. `also` contains additional required packages."""
    import mlflow.pyfunc
    from mlflow.models import Model

    logged = Model.log(
        artifact_path=None,
        flavor=mlflow.pyfunc,
        name="model",
        run_id=run_id,
        loader_module=__name__,
        data_path=str(folder),
        code_paths=[str(Path(flatout.__file__).parent)],
        # Otherwise MLflow would import packages that may not be installed.
        pip_requirements=[f"{name}=={version(name)}" for name in (*REQUIRED, *also)],
        **options,
    )
    return str(logged.model_uri)
