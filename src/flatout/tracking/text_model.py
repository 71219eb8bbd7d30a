"""A model of texts, as MLflow has it: `mlflow.pyfunc.load_model` gives what answers
texts. Logging imports neither torch nor transformers, and loads nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from flatout.tracking.pyfunc import log_pyfunc


class TextModel:
    """A pipeline of transformers for `task` on the folder `path`."""

    def __init__(self, path: str, task: str) -> None:
        import transformers

        self.pipeline = transformers.pipeline(task, model=path)

    def predict(self, texts: Any, params: dict[str, Any] | None = None) -> Any:
        """As the pipeline answers; classes as a table of label and score, a line a
        text. `texts`: strings, or a table with one column of them."""
        if isinstance(texts, pd.DataFrame):
            texts = texts.iloc[:, 0]
        found = self.pipeline([str(text) for text in texts], **(params or {}))
        is_class = self.pipeline.task == "text-classification"
        return pd.DataFrame(found) if is_class else found


def _load_pyfunc(path: str, model_config: dict[str, str]) -> TextModel:
    """MLflow's name for what loads a model."""
    return TextModel(path, model_config["task"])


def log_text_model(folder: Path, task: str, example: str, run_id: str) -> str:
    """Log what `save_pretrained` of model and tokenizer left in `folder` to the run.
    Returns the model's URI."""
    from mlflow.models import infer_signature

    is_class = task == "text-classification"
    answer = pd.DataFrame({"label": ["name"], "score": [0.5]}) if is_class else None
    return log_pyfunc(
        __name__,
        folder,
        run_id,
        model_config={"task": task},
        signature=infer_signature([example], answer),
    )
