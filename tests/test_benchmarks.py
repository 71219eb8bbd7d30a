"""The scripts in benchmarks/: the harness, and a small run of the cheapest script."""

import copy
import json
import subprocess
import sys
from argparse import Namespace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from benchmarks import (
    checkouts,
    commands,
    embeddings,
    encoders,
    harness,
    images,
    language_models,
    lstms,
    packed_loop,
    quality,
    scaling,
    training,
)
from tests.forks import Forked

SCRIPTS = (checkouts, commands, embeddings, encoders, images, language_models, lstms)
SCRIPTS += (quality,)


def test_sides_change_places_and_ratios_are_of_turns(monkeypatch, tmp_path):
    rates = {"flatout": [100.0, 50.0], "loop": [50.0, 25.0], "broken": []}
    asked = []

    def run(module, case, name, turn, checkout, out):
        asked.append(name)
        if name == "broken":
            return {"error": "status 1: no | memory"}
        return {"samples_per_s": rates[name].pop(0), "first_step_s": 2.0}

    monkeypatch.setattr(harness, "_run", run)
    sides = dict.fromkeys(rates, lambda given: {})
    script = harness.Script("benchmarks.some", "", {"one": sides})
    given = Namespace(turns=2, parallel=1, without=[], out=tmp_path)
    found = harness._by_turns(script, "one", given)
    assert asked == ["flatout", "loop", "broken", "loop", "flatout"]
    lines = harness._table("one", found, "samples_per_s").splitlines()
    assert lines[4] == "| flatout | 75 | 50 to 100 | 2 |  | first_step_s 2 |"
    assert lines[5].split(" | ")[4] == "2.00 (2.00 to 2.00)"
    assert lines[6].startswith("| broken | status 1: no / memory |")


@pytest.mark.parametrize("module", SCRIPTS, ids=lambda module: module.__name__)
def test_each_script_names_its_cases_and_sides(module):
    script = module.SCRIPT
    assert script.module == module.__name__
    assert set(script.small_cases) <= set(script.cases)
    assert all(len(sides) > 1 for sides in script.cases.values())
    for sides in script.cases.values():
        assert all(
            callable(side) or isinstance(side, partial) for side in sides.values()
        )


def test_scaling_has_a_small_model_for_each_of_its_types():
    types = {shape.config["model_type"] for shape in scaling.SHAPES.values()}
    assert types == {config["model_type"] for config in scaling.SMALL.values()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint with random weights, and pairs of texts with labels."""
    folder = tmp_path_factory.mktemp("quality")
    commands.prepared(folder, small=True)
    texts = pd.read_csv(folder / "texts.csv")["text"]
    for case, labels in (("MRPC", range(2)), ("STS-B", np.linspace(0, 5, 7))):
        for split, start in (("train", 0), ("test", 100)):
            own = texts[start : start + 64].reset_index(drop=True)
            columns = [own, own[::-1].reset_index(drop=True)]
            columns.append(pd.Series(np.resize(list(labels), len(own))))
            file = folder / f"{case}-{split}.csv"
            pd.concat(columns, axis=1).to_csv(file, header=False, index=False)
    return folder


def test_logits_are_those_of_single_rows_without_padding(checkpoint):
    model = str(checkpoint / "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(model)
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_pretrained(model).eval()
    given = Namespace(case="MRPC", data=checkpoint, small=True)
    table = quality.tokens(given, tokenizer, "test")
    rows = pd.read_csv(checkpoint / "MRPC-test.csv", header=None)
    with torch.inference_mode():
        single = [
            classifier(**tokenizer(first, second, return_tensors="pt")).logits[0]
            for first, second, _ in rows.itertuples(index=False)
        ]
    found = training.logits_of(classifier, tokenizer, table)
    np.testing.assert_allclose(found, torch.stack(single), rtol=0, atol=1e-6)
    assert table["labels"].to_pylist() == rows[2].tolist()


@pytest.mark.parametrize("case", quality.CLASSES)
@pytest.mark.parametrize("side", quality.SIDES)
def test_each_side_is_judged_on_the_test_rows(case, side, checkpoint):
    model = str(checkpoint / "checkpoint")
    asked = {"data": checkpoint, "model": model, "small": True, "turn": "1"}
    found = quality.SIDES[side](Namespace(case=case, **asked))
    assert -1 <= found["test_metric"] <= 1


@pytest.mark.parametrize("multiple", [1, 256])
@pytest.mark.parametrize("kind", ["bert", "modernbert", "qwen3"])
def test_the_packed_loop_learns_what_padded_transformers_learn(kind, multiple):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 64, "vocab_size": 99, "pad_token_id": 0}
    own = {"qwen3": {"num_key_value_heads": 2, "head_dim": 8}}
    own["modernbert"] = {"local_attention": 16, "num_labels": training.LABELS}
    own["bert"] = {"num_labels": training.LABELS}
    config = AutoConfig.for_model(kind, **sizes, **own[kind])
    classes = AutoModelForSequenceClassification, AutoModelForCausalLM
    auto = classes[kind == "qwen3"]
    padded = auto.from_config(config, attn_implementation="eager").eval()
    packed = copy.deepcopy(padded)
    packed.set_attn_implementation(training.register_packed_attention())
    shape = training.Shape({"model_type": kind, "vocab_size": 99}, 5, steps=2)
    batch = next(iter(packed_loop.PackedBatches(shape, multiple)))
    assert len(batch["ids"]) % multiple == 0
    bounds = batch["bounds"].tolist()[: shape.batch + 1]
    rows = [{"input_ids": batch["ids"][a:b].tolist()} for a, b in pairwise(bounds)]
    for row, label in zip(rows, batch["labels"], strict=False):
        row["labels"] = label
    given = training.padding_collator(causal=kind == "qwen3")(rows)
    expected = padded(**given).loss
    expected.backward()
    found = packed_loop.loss_of(packed, batch, shape.longest)
    found.backward()
    torch.testing.assert_close(found, expected)
    for name, parameter in padded.named_parameters():
        torch.testing.assert_close(packed.get_parameter(name).grad, parameter.grad)


def test_means_deviations_and_the_error_of_the_difference_are_shown():
    runs = {"flatout": [0.8, 0.9], "Trainer": [0.7, 0.7]}
    runs = {name: [{"test_metric": v} for v in own] for name, own in runs.items()}
    row = quality.summary("MRPC", runs)
    assert row == "\n| MRPC | 0.8500, 0.0707 | 0.7000, 0.0000 | 0.1500, 0.0500 |\n"


def forked(command, check, **given):
    """Run a side in a fork, which does not repeat the imports."""
    if "--side" not in command:
        return subprocess.run(command, check=check, **given)
    return subprocess.CompletedProcess(command, Forked(command, **given).wait())


@pytest.mark.process
@pytest.mark.slow
def test_a_script_runs_small(tmp_path, monkeypatch):
    others = [name for name in encoders.SIDES if "Trainer, b" in name]
    asked = ["--small", "--turns=1", f"--out={tmp_path}", "--without", *others]
    monkeypatch.setattr(sys, "argv", ["encoders", *asked])
    forking = SimpleNamespace(**{**vars(subprocess), "run": forked})
    monkeypatch.setattr(harness, "subprocess", forking)
    assert harness.main(encoders.SCRIPT) == 0
    kept = json.loads((tmp_path / "encoders.json").read_text())
    runs = kept["runs"]["batch 16"]
    assert list(runs) == ["flatout", "packed loop", "Trainer, random order"]
    assert all(own[0]["samples_per_s"] > 0 for own in runs.values())
    assert "| flatout |" in (tmp_path / "encoders.md").read_text()
