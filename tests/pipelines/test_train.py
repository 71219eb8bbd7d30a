"""The train node in this process, with outputs saved by the project's own catalog."""

import json
import traceback

import datasets
import numpy as np
import pytest
from transformers import AutoTokenizer

from flatout.engine.train.step import Stepper
from flatout.pipelines.train import create_pipeline
from tests.engine.families import token_rows
from tests.pipelines.tokens import write_tokens
from tests.projects import context_of


def trained(tmp_path, task, family, label_names=()):
    """Return the folder of reports after two steps on random rows."""
    asked = {
        "data_dir": str(tmp_path),
        "model": {"task": task, "config": {"model_type": family}},
        "train": {"max_steps": 2, "distributed": {"num_processes": 1}},
    }
    catalog = context_of("test", runtime_params=asked).catalog
    folder = write_tokens(tmp_path) / "06_models/tokenizer"
    node = create_pipeline().only_nodes("train_model").nodes[0]
    tokens = datasets.Dataset(token_rows(task, 24).table)
    given = {f"{name}_tokens": tokens for name in ("train", "validation", "test")}
    given |= {
        "tokenizer": AutoTokenizer.from_pretrained(folder),
        "label_names": list(label_names),
    }
    inputs = {
        name: given[name] if name in given else catalog.load(name)
        for name in node.inputs
    }
    for name, output in node.run(inputs).items():
        catalog.save(name, output)
    return tmp_path / "08_reporting"


@pytest.mark.parametrize(
    ("task", "family"), [("regression", "bert"), ("causal-lm", "gpt2")]
)
def test_tasks_without_classes_are_saved_whole(tmp_path, task, family):
    reports = trained(tmp_path, task, family)
    report = json.loads((reports / "train_report.json").read_text())
    assert report["steps"] == 2
    model = tmp_path / "06_models/model"
    assert json.loads((model / "trained_on.json").read_text()) == {
        "train_key": report["token_key"],
        "train_rows": 24,
        "seed": 42,
    }
    ids = token_rows(task, 24).table["input_ids"].to_pylist()
    assert len(np.load(model / "trained_rows.npy")) == len(set(map(tuple, ids)))


def test_seven_frames_lead_from_the_node_to_the_update(tmp_path, monkeypatch):
    """This is the complete call stack of a step, for readers of the code."""
    found, update = [], Stepper.update

    def noted(stepper):
        found.append([frame.name for frame in traceback.extract_stack()])
        update(stepper)

    monkeypatch.setattr(Stepper, "update", noted)
    trained(tmp_path, "regression", "bert")
    way = ["train_model", "launch", "train", "take_step", "__call__", "launch", "noted"]
    assert [names[names.index("train_model") :] for names in found] == [way, way]
