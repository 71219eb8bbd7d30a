"""The files stored alongside an exported model: the tokenizer, labels, calibration and
a short Python example that loads the model without flatout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from scipy.special import expit

from flatout.engine.export.formats import OUTPUT, Inputs
from flatout.engine.files.calibration import CALIBRATION
from flatout.engine.models.trained_rows import FACTS, HASHES
from flatout.engine.predict.predictor import Predictor
from flatout.engine.tasks import Calibrated, RankedRows
from flatout.engine.tasks._shared.cross_entropy import CrossEntropy

ABOUT, STATISTICS = "export.json", ("mean", "std")
LEFT = ("*.safetensors*", "*.bin", "README.md", CALIBRATION, FACTS, HASHES, ".*")
"""Patterns of files in the model's folder that are not copied to the export."""
START = """import json, numpy as np
from scipy.special import expit, softmax
about = json.load(open("export.json"))"""
TEXTS = """from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(".", model_max_length=about["max_length"])
rows = tokenizer(TEXTS, padding=True, truncation=True, return_tensors="np")"""
TWO_TEXTS = '["a text", "another text"]'
FORMS = {
    "ranking": '["a query"] * 2, ["a passage", "another passage"]',
    "words": '[["two", "words"], ["one"]], is_split_into_words=True',
}
IMAGES = """pixels = np.zeros((2, *about["shape"]), "uint8")  # your images
mean, deviation = np.array(about["statistics"], "float32")
rows = {"pixel_values": ((pixels - mean) / deviation).transpose(0, 3, 1, 2)}"""
ARRAYS = 'rows = {"inputs": np.zeros((2, *about["shape"]), about["inputs"]["inputs"])}'
SAMPLES = {"inputs": ARRAYS, "pixel_values": IMAGES}
ONNX = """import onnxruntime
run = onnxruntime.InferenceSession("model.onnx").run
outputs = run(None, {name: rows[name] for name in about["inputs"]})[0]"""
TORCH = """import torch
torch.set_grad_enabled(False)
run = torch.export.load("model.pt2").module()
outputs = run({name: torch.tensor(rows[name]) for name in about["inputs"]}).numpy()"""
COMPILED = TORCH.replace(
    "\noutputs", "\nrun = torch.compile(run, dynamic=True)\noutputs"
)
ANSWERS = {
    "classes": """shares = softmax(outputs / about["temperature"], axis=-1)
best = (shares - about["thresholds"]).argmax(-1)
print([about["labels"][n] for n in best.ravel()], shares)""",
    "labels": """shares = expit(outputs / about["temperature"])
given = shares > about["thresholds"]
print([[about["labels"][n] for n in np.flatnonzero(row)] for row in given], shares)""",
    "scores": "print(expit(outputs[:, 0]))",
    "numbers": "print(outputs)",
}
"""The last lines of the example code, keyed by the meaning of the model's outputs."""


class Example:
    """The example code and the data (`about`) that a program needs to use an exported
    model, and the rows with which the model is traced (`inputs`)."""

    def __init__(self, predictor: Predictor, config: Any, inputs: Inputs) -> None:
        # Tracing cannot tell rows from tokens if there are as many rows as tokens.
        rows = 3 - any(3 in t.shape[1:2] for t in inputs.values())
        self.inputs = {
            n: t.repeat(3, *[1] * (t.dim() - 1))[:rows] for n, t in inputs.items()
        }
        self._source, self._form = config.name_or_path, predictor.task.texts.form
        task, labels = predictor.task, predictor.label_names
        kind, temperature, thresholds = _kind(task), 1.0, [0.0] * len(labels)
        if isinstance(task, Calibrated):
            temperature = task.calibration.temperature
            cuts = expit(task.cuts()).tolist()
            if kind == "labels":
                thresholds = cuts
            elif len(cuts) == 1:
                thresholds = [1 - cuts[0], cuts[0]]
        self.about = {
            "task": task.settings.task,
            "inputs": {n: str(t.numpy().dtype) for n, t in self.inputs.items()},
            "output": OUTPUT,
            "kind": kind,
            "labels": labels,
            "temperature": temperature,
            "thresholds": thresholds,
            "max_length": predictor.max_length,
            "shape": predictor.shape,
            "statistics": [getattr(config, f"image_{n}", None) for n in STATISTICS],
        }

    def write(self, name: str, folder: Path) -> None:
        """Write the tokenizer, `export.json` and a README.md with the example code for
        the format `name` into `folder`."""
        for file in Path(self._source).glob("*"):
            if file.is_file() and not any(map(file.match, LEFT)):
                shutil.copy(file, folder)
        about = json.dumps({"format": name, **self.about}, indent=2) + "\n"
        (folder / ABOUT).write_text(about, encoding="utf-8")
        text = f"`{ABOUT}` has labels, temperature and thresholds. In this folder:\n"
        text += f"\n```python\n{self.code(name)}\n```\n"
        (folder / "README.md").write_text(text, encoding="utf-8")

    def code(self, name: str) -> str:
        """Return Python code, to be run in the exported folder of the format `name`."""
        texts = TEXTS.replace("TEXTS", FORMS.get(self._form, TWO_TEXTS))
        rows = next((SAMPLES[n] for n in self.inputs if n in SAMPLES), texts)
        run = {"torch_export": TORCH, "compiled": COMPILED}.get(name, ONNX)
        return "\n".join([START, rows, run, ANSWERS[str(self.about["kind"])]])


def _kind(task: Any) -> str:
    """Return the meaning of the task's outputs, as a key of ANSWERS."""
    if isinstance(task, RankedRows):
        return "scores"
    if isinstance(task, Calibrated) and getattr(task, "label_shape", None):
        return "labels"
    return "classes" if isinstance(task, CrossEntropy) else "numbers"
