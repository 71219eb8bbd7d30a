"""`kedro flatout benchmark`: guide E's words become parameters of a run."""

from __future__ import annotations

import shutil

import pytest
import yaml
from click.testing import CliRunner

from flatout import cli
from flatout.cli.grid import grid_parameters, of_samples
from flatout.engine.parameters import SettingsError, parse_settings
from tests.conftest import PROJECT, kedro
from tests.test_first_settings import KINDS, write

ASKED = (
    "--batch-sizes 128 256 512 --num-workers 4 8 --prefetch 2 4 "
    "--pin-memory true false --steps 20 --device auto"
).split()


def parsed(arguments: list[str]) -> dict:
    command = cli.flatout.commands["benchmark"]
    return command.make_context("benchmark", list(arguments)).params


def test_lists_are_taken_up_to_the_next_option():
    options = parsed(ASKED)
    assert (options["steps"], options["device"]) == (20, "auto")
    given = grid_parameters(options)
    found = parse_settings({"model": {"config": {"model_type": "bert"}}, **given})
    grid = found.benchmark
    assert (grid.mode, grid.free_global_batch) == ("grid", True)
    assert grid.batch_sizes == [128, 256, 512]
    assert (grid.num_workers, grid.prefetch_factors) == ([4, 8], [2, 4])
    assert (grid.pin_memory, grid.steps_per_trial) == ([True, False], 20)


def test_an_equals_sign_does_as_well():
    found = parsed(["--batch-sizes=8", "16", "--prefetch=2"])
    assert (found["batch_sizes"], found["prefetch"]) == ("8 16", "2")


def test_a_model_and_a_task_are_those_of_the_run():
    given = grid_parameters(parsed(["--model", "some/model", "--task", "regression"]))
    assert given["model"] == {"name_or_path": "some/model", "task": "regression"}


def test_without_lists_the_configured_ones_count():
    assert grid_parameters(parsed([])) == {
        "benchmark": {"mode": "grid", "free_global_batch": True}
    }


@pytest.mark.parametrize("kind", ["arrays", "images"])
def test_samples_have_an_environment_and_pipelines_of_their_own(kind):
    assert of_samples(kind, "data/x") == {
        "env": kind,
        "pipelines": (kind, "benchmark"),
        "params": {kind: {"path": "data/x"}},
    }


def test_a_task_of_texts_is_refused_for_samples():
    with pytest.raises(SettingsError, match=r"one of texts, and d\.h5 holds arrays"):
        of_samples("arrays", "d.h5", "token-classification")
    assert of_samples("arrays", "d.h5", "regression") == of_samples("arrays", "d.h5")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cuda"], "--device cuda: no GPU is seen here"),
        (["--batch-sizes", "--steps", "2"], "--batch-sizes needs at least one value"),
        (["--device", "tpu"], "'tpu' is not one of"),
        (["--data-path", "gone.csv"], "gone.csv is not there"),
        (["--steps", "0"], "0 is not in the range x>=1"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, said, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = CliRunner().invoke(cli.flatout, ["benchmark", *arguments])
    assert done.exit_code in (2, 3)
    assert said in " ".join(done.output.split())


@pytest.mark.process
def test_it_is_a_run_on_the_file_with_these_parameters(tmp_path, monkeypatch):
    """One that the check of parameters refuses, so that nothing is measured."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # --device cpu sets it for good
    conf = tmp_path / "conf"
    shutil.copytree(PROJECT / "conf", conf, ignore=shutil.ignore_patterns("local"))
    file = write(tmp_path / "reviews.csv", KINDS["reviews.csv"][0])
    where = (f"--conf-source={conf}", f"--data-dir={tmp_path / 'data'}")
    lists = ("--batch-sizes", "8", "many", "--device", "cpu")
    asked = ("flatout", "benchmark", "--data-path", str(file), *lists, *where)
    done = kedro(*asked)
    assert done.returncode == 2, done.stdout
    assert "review is the text, stars has 5 classes" in done.stdout
    assert "kedro run --pipelines=split,tokenize,benchmark, mode grid" in done.stdout
    assert "benchmark.batch_sizes" in done.stdout
    catalog = yaml.safe_load((conf / "local/catalog.yml").read_text())
    assert catalog["raw_texts"]["filepath"] == str(file)
    again = CliRunner().invoke(cli.cli, asked)
    assert "would be replaced" in again.output
