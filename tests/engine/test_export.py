"""Exported models: their outputs, metrics and files, loaded without flatout."""

import importlib.util
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import onnxruntime
import pandas as pd
import pyarrow as pa
import pytest
import torch
from transformers import AutoModel

from flatout.engine.export import exporting
from flatout.engine.export.exporting import export
from flatout.engine.export.formats import Exported, Forward, load
from flatout.engine.export.measured import Measure, _draws
from flatout.engine.files.calibration import Calibration
from flatout.engine.launch.launch import run_job
from flatout.engine.models.building import ModelError, load_pretrained
from flatout.engine.parameters import SettingsError, parse_settings
from flatout.engine.predict.predicting import predict
from flatout.engine.predict.split_predictions import SplitPredictions
from flatout.engine.tokenizing.tokenizer import TokenizerFile
from tests.conftest import PROJECT
from tests.engine import test_arrays as arrays, test_images as images
from tests.engine.families import CONFIGS, LABEL_NAMES, NAMED, task_of, token_rows
from tests.engine.test_embedding import pair_rows
from tests.make import plain_logits, save_random
from tests.pipelines.tokens import write_tokens
from tests.servers import serving

CLASSES, LABELS = "sequence-classification", "multi-label-classification"
ONE_LAYER = {"num_hidden_layers": 1}
"""One layer, because tracing takes a second per layer."""
TEXTS = ["p7 p8 p20", "p9", "p41 p5 p77 p12"]


@pytest.fixture(autouse=True, scope="module")
def quick():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flatout.engine.export.measured.SECONDS", 0.01)
        patch.setattr("flatout.engine.export.measured.RESAMPLES", 40)
        yield


def exported(*parts) -> dict:
    """Return the report of `export` for padded rows, as the node does."""
    *parts, settings = parts
    padded = settings.changed({"predict.strategy": "grouped"})
    return export(SplitPredictions(*parts, padded))


class Made:
    """A saved model with random weights, and its exports."""

    def __init__(self, folder: Path, family: str, task: str, **model) -> None:
        write_tokens(folder)
        self.folder, self.task = folder / "06_models/model", task
        self.names = LABEL_NAMES if task in NAMED else []
        self.to, given = folder / "export", {"task": task, **model}
        given["config"] = {"model_type": family, **CONFIGS[family], **ONE_LAYER}
        if family == "modernbert":
            given["config"] |= {"layer_types": ["sliding_attention"]}
        self.given = {
            "runtime": {"precision": "fp32", "threads": 1},
            "model": given,
            "tokenize": {"max_length": 24},
        }
        settings = parse_settings(self.given)
        tokenizer = folder / "06_models/tokenizer"
        save_random(self.folder, tokenizer, settings.model, self.names)
        self.rows = token_rows(task, 40)

    def settings(self, *formats: str, **model):
        named = {"formats": [*formats], "folder": str(self.to)} if formats else {}
        given = {**self.given, "model": {**self.given["model"], **model}}
        return parse_settings({**given, "export": named})

    def export(self, *formats: str, **model) -> dict[str, dict]:
        """Return the report, with its lines by format."""
        rows = datasets.Dataset(self.rows.table)
        loaded = load_pretrained(self.folder).eval()
        given = (TokenizerFile(self.folder), rows, rows, self.names)
        found = exported(loaded, *given, self.settings(*formats, **model))
        return {**found, **{line["format"]: line for line in found["formats"]}}

    def predicted(self, **model) -> pd.DataFrame:
        """Return the predictions of the predict pipeline for TEXTS."""
        loaded, texts = load_pretrained(self.folder), pd.DataFrame({"text": TEXTS})
        settings = self.settings(**model)
        found = predict(loaded, TokenizerFile(self.folder), texts, settings)
        return pa.Table.from_batches(found.batches(), found.schema).to_pandas()


@pytest.fixture(scope="module")
def classes(tmp_path_factory) -> tuple[Made, dict]:
    """A classifier with a temperature, exported to two formats."""
    made = Made(tmp_path_factory.mktemp("classes"), "bert", CLASSES)
    Calibration(2.5, None, "k").save(made.folder)
    return made, made.export("onnx", "onnx_int8", "torch_export")


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> list[Path]:
    """Folders of exported models for arrays and images."""
    found = []
    shallow = {"config": images.VIT | ONE_LAYER}
    for kind, name, own in ((arrays, "onnx", {}), (images, "torch_export", shallow)):
        job = kind.job_of(folder := tmp_path_factory.mktemp(name), max_steps=2, **own)
        run_job(job).model.save_pretrained(folder / "model")
        named = {"formats": [name], "folder": str(folder)}
        given = {**job.settings.model_dump(mode="json"), "export": named}
        rows, names = datasets.Dataset(job.test.table), [*job.label_names]
        loaded = load_pretrained(folder / "model").eval()
        report = exported(loaded, None, rows, rows, names, parse_settings(given))
        assert report["formats"][1]["largest_difference"] < 1e-4
        about = json.loads((folder / name / "export.json").read_text())
        assert len(about["shape"]) > 0
        found.append(folder / name)
    return found


def test_onnx_gives_the_outputs_of_transformers_and_its_figures(classes):
    made, found = classes
    session = onnxruntime.InferenceSession(made.to / "onnx/model.onnx")
    wanted = torch.stack(plain_logits(made.folder, made.rows)).numpy()
    for row, ids in enumerate(made.rows.views(np.arange(len(made.rows)))):
        given = {"input_ids": ids[None].astype(np.int64)}
        given["attention_mask"] = np.ones_like(given["input_ids"])
        (one,) = session.run(None, given)
        assert one[0] == pytest.approx(wanted[row], abs=1e-4)
    labels = made.rows.labels_of(np.arange(len(made.rows)))
    accuracy = (wanted.argmax(-1) == labels).mean()
    for name in ("pytorch", "onnx", "torch_export"):
        line = found[name]
        assert line["value"] == pytest.approx(accuracy)
        assert line["largest_difference"] < 1e-4
        assert line["value_low"] <= accuracy <= line["value_high"]
        assert line["change"] == 0 == line["change_low"] == line["change_high"]
        assert min(line["rows_per_s_at_1"], line["rows_per_s_at_32"]) > 0
    assert found["onnx_int8"]["largest_difference"] > 1e-4
    size = (made.to / "onnx/model.onnx").stat().st_size
    assert found["onnx"]["size_mib"] == pytest.approx(size / 2**20)
    assert found["pick"] in {"pytorch", "onnx", "onnx_int8", "torch_export"}
    assert (found["figure"], found["rows"]) == ("accuracy", 40)


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.timeout(900)
def test_the_compiled_format_gives_the_same_outputs(tmp_path):
    made = Made(tmp_path, "bert", CLASSES)
    line = made.export("compiled")["compiled"]
    assert line["fault"] is None and line["largest_difference"] < 1e-4
    assert "dynamic=True" in (made.to / "compiled/README.md").read_text()


BARE = """
import json, os, sys
for folder, code in json.loads(sys.argv[1]).items():
    os.chdir(folder)
    exec(code, {})
assert "flatout" not in sys.modules
"""


@pytest.mark.slow
def test_the_readmes_predict_without_flatout(classes, samples):
    """All examples run in one process, which has to import PyTorch and transformers."""
    made, _ = classes
    texts, codes = [made.to / name for name in ("onnx", "torch_export")], {}
    for folder in (*texts, *samples):
        code = (folder / "README.md").read_text().split("```")[1]
        code = code.removeprefix("python\n")
        assert "flatout" not in code and len(code.strip().splitlines()) <= 13
        code = code.replace('["a text", "another text"]', repr(TEXTS))
        codes[str(folder)] = f"{code}\nprint('----')"
    done = subprocess.run(
        [sys.executable, "-c", BARE, json.dumps(codes)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = made.predicted()
    columns = [f"probability_{label}" for label in LABEL_NAMES]
    for told in done.stdout.split("----\n")[: len(texts)]:
        assert told.startswith(repr(found["label"].tolist()))
        numbers = re.findall(r"\d\.[\de-]+", told)
        shares = np.array(numbers, float).reshape(3, 3)
        assert shares == pytest.approx(found[columns].to_numpy(), abs=1e-5)


def served():
    path = PROJECT / "deploy/onnx_server.py"
    spec = importlib.util.spec_from_file_location("onnx_server", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_server_answers_like_predict(classes):
    made, _ = classes
    module = served()
    module.MODEL = module.Model(str(made.to / "onnx"))

    def asked(what):
        body = json.dumps(what).encode()
        with urllib.request.urlopen(url, body, timeout=60) as answer:
            return json.loads(answer.read())

    with serving(module.Handler) as url:
        found, wanted = pd.DataFrame(asked({"texts": TEXTS})), made.predicted()
        assert found["label"].tolist() == wanted["label"].tolist()
        for column in found.columns[1:]:
            close = pytest.approx(wanted[column].to_numpy(), abs=1e-5)
            assert found[column].to_numpy() == close
        with pytest.raises(urllib.error.HTTPError, match="400"):
            asked({"words": 3})


def answers_of(kind: str, outputs, **about):
    """Return what the server computes from given outputs."""
    model = object.__new__(served().Model)
    known = {"labels": LABEL_NAMES, "temperature": 2.0, "thresholds": [0.0] * 3}
    model.about = {"kind": kind, "inputs": {"inputs": "float32"}, **known, **about}
    model.session = type("S", (), {"run": lambda *a: [np.array(outputs, "f4")]})()
    return model.predict({"inputs": [[1.0]]})


def test_the_server_reads_rows_by_the_names_of_columns():
    model = object.__new__(served().Model)
    model.about = {"inputs": {"inputs": "float32"}, "columns": ["a", "b"]}
    rows = [{"b": 2, "c": 9, "a": 1}, {"a": 3, "b": 4}]
    assert model._inputs({"inputs": rows})["inputs"].tolist() == [[1, 2], [3, 4]]
    with pytest.raises(KeyError, match="b"):
        model._inputs({"inputs": [{"a": 1}]})


def test_thresholds_and_temperature_decide_what_is_served():
    labels = answers_of("labels", [[2.0, -2.0, 0.2]], thresholds=[0.8, 0.2, 0.5])
    assert labels[0]["label"] == ["b", "c"]  # 0.73, 0.27, 0.52
    two = {"labels": ["no", "yes"], "thresholds": [0.7, 0.3]}
    assert answers_of("classes", [[1.0, 0.0]], **two)[0]["label"] == "yes"  # 0.38
    assert answers_of("classes", [[2.0, 0.0]], **two)[0]["label"] == "no"  # 0.27
    assert answers_of("numbers", [[1.5]]) == [{"value": [1.5]}]
    assert answers_of("scores", [[0.0]]) == [{"score": 0.5}]
    assert answers_of("classes", [[[0, 9, 0], [9, 0, 0]]]) == [{"label": ["b", "a"]}]


@pytest.mark.parametrize(
    ("family", "task", "figure"),
    [
        ("modernbert", "regression", "pearson"),
        ("bert", "token-classification", "accuracy"),
        ("bert", "reranking", "mrr_at_10"),
        pytest.param("qwen3", LABELS, "accuracy", marks=pytest.mark.slow),
    ],
)
def test_every_task_is_traced_with_its_figure(tmp_path, family, task, figure):
    made = Made(tmp_path, family, task)
    found = made.export("torch_export")
    assert found["figure"] == figure
    line = found["torch_export"]
    assert line["largest_difference"] < 1e-4 and line["change"] == 0
    rows = datasets.Dataset(made.rows.table)
    loaded, file = load_pretrained(made.folder), TokenizerFile(made.folder)
    given = (rows, rows, made.names, made.settings())
    wanted = SplitPredictions(loaded, file, *given).value()[figure]
    assert line["value"] == pytest.approx(wanted, abs=1e-4)
    about = json.loads((made.to / "torch_export/export.json").read_text())
    kinds = {"regression": "numbers", "reranking": "scores", LABELS: "labels"}
    assert about["kind"] == kinds.get(task, "classes")


def test_vectors_are_exported_and_have_length_1(tmp_path):
    made = Made(tmp_path, "bert", "embedding", pooling="last")
    made.rows = pair_rows(20)
    found = made.export("torch_export", "onnx")
    model = AutoModel.from_pretrained(made.folder).eval()
    for name in ("torch_export", "onnx"):
        line = found[name]
        assert found["figure"] == "recall_at_1" and line["value_low"] is None
        assert line["largest_difference"] < 1e-4
        check_pooled(made.to / name, model, "last")


class States(torch.nn.Module):
    """Returns states that only depend on the tokens themselves."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(100, 8)

    def forward(self, input_ids, attention_mask=None):
        return SimpleNamespace(last_hidden_state=self.table(input_ids))


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_vectors_are_pooled(tmp_path, pooling):
    model, ids = States(), torch.tensor([[1, 6, 7], [1, 2, 0], [3, 2, 0]])
    example = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    forward = Forward(model, task_of("embedding", pooling=pooling))
    Exported(forward, example, None).save("torch_export", tmp_path)
    check_pooled(tmp_path, model, pooling)


@torch.no_grad()
def check_pooled(folder, model, pooling):
    """Check two rows, one of them padded, against each row alone."""
    ids = torch.tensor([[1, 7, 8, 2, 0, 0], [1, 9, 11, 30, 31, 2]])
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    vectors = load(folder.name, folder)(inputs)
    states = model(input_ids=ids[:1, :4]).last_hidden_state[0]
    one = {"mean": states.mean(0), "first": states[0], "last": states[-1]}[pooling]
    torch.testing.assert_close(vectors[0], one / one.norm(), atol=1e-5, rtol=0)


def test_rows_of_a_query_are_drawn_together():
    drawn = _draws(np.array([3, 1, 3, 1, 2]))
    assert len(drawn) > 10
    for sample in drawn:
        counts = np.bincount(sample.numpy(), minlength=5)
        assert counts[0] == counts[2] and counts[1] == counts[3]


def test_a_picked_format_is_fast_and_not_worse():
    def line(name, rate, change, low, high):
        ends = {"change": change, "change_low": low, "change_high": high}
        return {"format": name, "rows_per_s_at_1": rate, **ends}

    lines = [
        line("pytorch", 10.0, 0, 0, 0),
        line("onnx", 30.0, 0, 0, 0),
        line("onnx_int8", 90.0, -0.1, -0.2, -0.05),
    ]
    found = exporting._pick(lines, "accuracy")
    assert found["pick"] == "onnx" and "worse: onnx_int8" in found["reason"]
    assert exporting._pick(lines, "loss")["pick"] == "onnx_int8"
    lines[2] |= {"change_high": 0.01}
    assert exporting._pick(lines, "accuracy")["pick"] == "onnx_int8"
    lines[2] |= {"change_low": None, "change_high": None}
    assert exporting._pick(lines, "accuracy")["pick"] == "onnx"
    unknown = [line(name, 10.0, *3 * [float("nan")]) for name in ("pytorch", "onnx")]
    assert exporting._pick(unknown, "accuracy")["pick"] == "pytorch"


def test_a_language_model_is_refused(tmp_path):
    made = Made(tmp_path, "bert", "masked-lm")
    with pytest.raises(ModelError, match="does not answer this: the task masked-lm"):
        made.export("torch_export")
    assert not made.to.exists()


def test_faults_of_one_format_leave_the_others(tmp_path, monkeypatch):
    made = Made(tmp_path, "bert", CLASSES)
    monkeypatch.setattr(Measure, "_rate", lambda *a: 1.0)
    monkeypatch.setattr(exporting, "load", lambda *a: zeros)

    def zeros(inputs):
        return torch.zeros(len(inputs["input_ids"]), len(LABEL_NAMES))

    def fails(self, name, folder):
        (folder / "model.onnx").write_bytes(b"half")
        if name == "torch_export":
            return
        if name == "onnx":
            raise ImportError("No module named 'onnxscript'")
        raise RuntimeError("no such operator\nmore")

    monkeypatch.setattr(exporting.Exported, "save", fails)
    with pytest.raises(ModelError, match=r"onnx: No module.*flatout\[export\]"):
        made.export("onnx", "onnx_int8")
    assert not [*made.to.glob("*")]
    found = made.export("onnx_int8", "torch_export")
    assert found["onnx_int8"]["fault"].endswith("(no such operator)")
    assert [path.name for path in made.to.iterdir()] == ["torch_export"]


def test_unknown_formats_are_refused():
    with pytest.raises(SettingsError, match=r"export\.formats"):
        parse_settings({"export": {"formats": ["tflite"]}})
