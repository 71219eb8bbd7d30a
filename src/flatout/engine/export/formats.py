"""Trace a transformers model that runs on padded rows, and write it in formats for
other programs, with the example code that these programs need."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from scipy.special import expit
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.nn.functional import normalize

from flatout.engine.families._family import row_means
from flatout.engine.files.calibration import CALIBRATION
from flatout.engine.machine.environment import set_defaults
from flatout.engine.models.building import ModelError
from flatout.engine.models.trained_rows import FACTS, HASHES
from flatout.engine.tasks import Calibrated, HeadKind, RankedRows, Task, has_custom_head
from flatout.engine.tasks._shared.cross_entropy import CrossEntropy

OUTPUT, ONNX, PROGRAM, ABOUT = "output", "model.onnx", "model.pt2", "export.json"
LEFT = ("*.safetensors*", "*.bin", "README.md", CALIBRATION, FACTS, HASHES, ".*")
"""Patterns of files in the model's folder that are not copied to the export."""
Inputs = dict[str, Tensor]
Run = Callable[[Inputs], Tensor]
"""A function from named input tensors to the output of `Forward`."""

START = """import json, numpy as np
from scipy.special import expit, softmax
about = json.load(open("export.json"))"""
TEXTS = """from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(".", model_max_length=about["max_length"])
rows = tokenizer(TEXTS, padding=True, truncation=True, return_tensors="np")"""
FORMS = {
    "text": '["a text", "another text"]',
    "ranking": '["a query"] * 2, ["a passage", "another passage"]',
    "words": '[["two", "words"], ["one"]], is_split_into_words=True',
}
IMAGES = """pixels = np.zeros((2, *about["shape"]), "uint8")  # your images
mean, deviation = np.array(about["statistics"], "float32")
rows = {"pixel_values": ((pixels - mean) / deviation).transpose(0, 3, 1, 2)}"""
ARRAYS = 'rows = {"inputs": np.zeros((2, *about["shape"]), about["inputs"]["inputs"])}'
SAMPLES = {"inputs": ARRAYS, "pixel_values": IMAGES}
"""The code for inputs of a fixed shape per row. Token inputs (B, T) have any length."""
RUN_ONNX = """import onnxruntime
run = onnxruntime.InferenceSession("model.onnx").run
outputs = run(None, {name: rows[name] for name in about["inputs"]})[0]"""
RUN_PROGRAM = """import torch
torch.set_grad_enabled(False)
run = torch.export.load("model.pt2").module()
outputs = run({name: torch.tensor(rows[name]) for name in about["inputs"]}).numpy()"""
COMPILE = "\nrun = torch.compile(run, dynamic=True)\noutputs"
RUN_COMPILED = RUN_PROGRAM.replace("\noutputs", COMPILE)
RUNS = {"torch_export": RUN_PROGRAM, "compiled": RUN_COMPILED}
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


class Forward(nn.Module):
    """Computes the logits (B, ...), or the vectors (B, H) of an embedding model, from
    named tensors. Raises ModelError if a single forward pass cannot produce the task's
    predictions."""

    def __init__(self, model: Any, task: Task) -> None:
        super().__init__()
        self.model, self.pooling = model, task.pooling
        is_language = task.head_kind in (HeadKind.VOCABULARY, HeadKind.DIRECTIONS)
        if is_language or (has_custom_head(task) and task.pooling is None):
            why = "is a language model's" if is_language else "has a custom head"
            raise ModelError(
                f"export: one forward pass of the saved model does not answer this: "
                f"the task {task.settings.task} {why}. Use kedro run "
                "--pipelines=predict, or load the model's folder with transformers"
            )

    def forward(self, inputs: Inputs) -> Tensor:
        found = self.model(**inputs)
        if self.pooling is None:
            logits: Tensor = found.logits
            return logits
        states: Tensor = found.last_hidden_state
        if self.pooling == "mean":
            return normalize(row_means(states, inputs), dim=1)
        if self.pooling == "first":
            return normalize(states[:, 0], dim=1)
        mask = inputs["attention_mask"]
        last = mask * (mask.cumsum(1) == mask.sum(1, keepdim=True))
        return normalize((states * last.unsqueeze(-1)).sum(1), dim=1)


class Exported:
    """A model that is traced once, with the rows `example`, for all batch sizes and
    sequence lengths. `predictor` runs the same model."""

    def __init__(self, forward: Forward, example: Inputs, predictor: Any) -> None:
        # ONNX Runtime sends usage data to Microsoft unless this variable is set.
        set_defaults({"ORT_DISABLE_TELEMETRY": "1"})
        self._forward, self._example, self._predictor = forward, example, predictor

    @cached_property
    def _program(self) -> ExportedProgram:
        free, example = Dim.DYNAMIC, self._example
        axes = {n: {0: free} if n in SAMPLES else {0: free, 1: free} for n in example}
        return export(self._forward, (example,), dynamic_shapes=(axes,))

    @cached_property
    def _onnx(self) -> Any:
        names: Any = {"input_names": [*self._example], "output_names": [OUTPUT]}
        return torch.onnx.export(self._program, verbose=False, **names)

    def save(self, name: str, folder: Path) -> None:
        """Write the model in the format `name` to `folder`."""
        if name == "onnx":
            self._onnx.save(folder / ONNX)
        elif name == "onnx_int8":
            from onnxruntime.quantization import quantize_dynamic

            model = self._onnx.model_proto
            # PyTorch 2.11 also stores the shapes of weights before they are transposed.
            # The quantizer infers all shapes itself and fails on the stored ones.
            del model.graph.value_info[:]
            quantize_dynamic(model, folder / ONNX)
        else:
            torch.export.save(self._program, folder / PROGRAM)

    @cached_property
    def about(self) -> dict[str, Any]:
        """The data that a program needs to use the exported model."""
        predictor, config = self._predictor, self._forward.model.config.to_dict()
        task, labels = predictor.task, predictor.label_names
        kind = "classes" if isinstance(task, CrossEntropy) else "numbers"
        kind = "scores" if isinstance(task, RankedRows) else kind
        temperature, thresholds = 1.0, [0.0] * len(labels)
        if isinstance(task, Calibrated):
            temperature, cuts = task.calibration.temperature, expit(task.cuts())
            if predictor.task.label_shape:
                kind, thresholds = "labels", cuts.tolist()
            elif len(cuts) == 1:
                thresholds = [1 - cuts.item(), cuts.item()]
        return {
            "task": task.settings.task,
            "inputs": {n: str(t.numpy().dtype) for n, t in self._example.items()},
            "output": OUTPUT,
            "kind": kind,
            "labels": labels,
            "temperature": temperature,
            "thresholds": thresholds,
            "max_length": predictor.max_length,
            "shape": predictor.shape,
            "columns": list(config.get("input_names", ())),
            "statistics": [config.get("image_mean"), config.get("image_std")],
        }

    def describe(self, name: str, folder: Path) -> None:
        """Write the tokenizer, `export.json` and a README.md with the example code for
        the format `name` into `folder`."""
        for file in Path(self._forward.model.config.name_or_path).glob("*"):
            if file.is_file() and not any(map(file.match, LEFT)):
                shutil.copy(file, folder)
        about = json.dumps({"format": name, **self.about}, indent=2) + "\n"
        (folder / ABOUT).write_text(about, encoding="utf-8")
        text = f"`{ABOUT}` has labels, temperature and thresholds. In this folder:\n"
        text += f"\n```python\n{self._code(name)}\n```\n"
        (folder / "README.md").write_text(text, encoding="utf-8")

    def _code(self, name: str) -> str:
        """Return Python code, to be run in the exported folder of the format `name`."""
        form = FORMS.get(self._predictor.task.texts.form, FORMS["text"])
        texts = TEXTS.replace("TEXTS", form)
        rows = next((SAMPLES[n] for n in self._example if n in SAMPLES), texts)
        run, answers = RUNS.get(name, RUN_ONNX), ANSWERS[self.about["kind"]]
        return "\n".join([START, rows, run, answers])


def load(name: str, folder: Path) -> Run:
    """Load the format `name` from `folder`, and return a function that runs it with as
    many threads as PyTorch uses."""
    if (folder / ONNX).is_file():
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(folder / ONNX, options)
        return lambda inputs: torch.from_numpy(
            session.run(None, {n: tensor.numpy() for n, tensor in inputs.items()})[0]
        )
    run: Run = torch.export.load(folder / PROGRAM).module()
    return torch.compile(run, dynamic=True) if name == "compiled" else run
