"""A model of texts in MLflow: `mlflow.pyfunc.load_model` returns a model that answers
texts. Logging imports neither torch nor transformers and loads no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from flatout.tracking.pyfunc import log_pyfunc

MULTI_LABEL = "multi_label_classification"


class TextModel:
    """Pipeline of transformers for `task` with the model in the folder `path`; an
    adapter is merged into its base, which must be where the training found it."""

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
        """Return the pipeline's answers; for classes and labels, a table of label and
        score with one row per text. `texts`: strings, or a table with one column of
        them."""
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
        """Return the class of two by the threshold of the second one; of several labels
        the names of those above theirs, and the highest probability."""
        thresholds = self._thresholds
        scores = {one["label"]: one["score"] for one in answers}
        above = [name for name, least in thresholds.items() if scores[name] > least]
        if thresholds.keys() == scores.keys():
            return {"label": ", ".join(above), "score": max(scores.values())}
        chosen = above or [name for name in scores if name not in thresholds]
        return {"label": chosen[0], "score": scores[chosen[0]]}


def _load_pyfunc(path: str, model_config: dict[str, str]) -> TextModel:
    """Load a model; MLflow requires this name."""
    return TextModel(path, model_config["task"])


def _has_adapter(path: str | Path) -> bool:
    return Path(path, "adapter_config.json").is_file()


def log_text_model(folder: Path, task: str, example: str, run_id: str) -> str:
    """Log the files of `save_pretrained` of model and tokenizer in `folder` to the run.
    Return the model's URI."""
    from mlflow.models import infer_signature

    is_class = task == "text-classification"
    answer = pd.DataFrame({"label": ["name"], "score": [0.5]}) if is_class else None
    return log_pyfunc(
        __name__,
        folder,
        run_id,
        also=("accelerate", "peft", "pyarrow") if _has_adapter(folder) else (),
        model_config={"task": task},
        signature=infer_signature([example], answer),
    )
