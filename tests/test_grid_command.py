"""`kedro flatout benchmark`: the options of guide E become parameters of a run."""

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from PIL import Image

from flatout import cli
from flatout.cli.grid import grid_parameters
from flatout.engine.parameters import parse_settings
from flatout.project.init.settings import other_kind
from tests.conftest import kedro
from tests.projects import copied_conf
from tests.test_first_settings import KINDS, write

ASKED = (
    "--batch-sizes 128 256 512 --num-workers 4 8 --prefetch 2 4 "
    "--pin-memory true false --steps 20 --device auto"
).split()


def parsed(arguments: list[str]) -> dict:
    command = cli.flatout.commands["benchmark"]
    return command.make_context("benchmark", list(arguments)).params


def parameters_of(arguments: list[str]) -> dict:
    options = parsed(arguments)
    names = ("data_path", "device", "conf_source", "data_dir")
    return grid_parameters(
        lists={n: v for n, v in options.items() if n not in (*names, "model", "task")},
        model=options["model"],
        task=options["task"],
    )


def test_lists_are_taken_up_to_the_next_option():
    assert parsed(ASKED)["device"] == "auto"
    given = parameters_of(ASKED)
    found = parse_settings({"model": {"config": {"model_type": "bert"}}, **given})
    grid = found.benchmark
    assert (grid.mode, grid.free_global_batch) == ("grid", True)
    assert grid.batch_sizes == [128, 256, 512]
    assert (grid.num_workers, grid.prefetch_factors) == ([4, 8], [2, 4])
    assert (grid.pin_memory, grid.steps_per_trial) == ([True, False], 20)


def test_an_equals_sign_does_as_well():
    found = parsed(["--batch-sizes=8", "16", "--prefetch=2"])
    assert (found["batch_sizes"], found["prefetch_factors"]) == ("8 16", "2")


def test_a_model_and_a_task_are_those_of_the_run():
    given = parameters_of(["--model", "some/model", "--task", "regression"])
    assert given["model"] == {"name_or_path": "some/model", "task": "regression"}


def test_without_lists_the_configured_ones_count():
    assert parameters_of([]) == {
        "benchmark": {"mode": "grid", "free_global_batch": True}
    }


def photos(folder) -> Path:
    for name, colour in (("cat", 200), ("dog", 50)):
        (folder / "photos" / name).mkdir(parents=True)
        for n in range(12):
            image = Image.new("RGB", (40 + n, 24), (colour, n, 0))
            image.save(folder / "photos" / name / f"{n}.png")
    return folder / "photos"


def test_numbers_images_and_texts_are_told_apart(tmp_path):
    for name in ("n.npz", "n.h5"):
        (tmp_path / name).touch()
        assert other_kind(tmp_path / name) == "arrays"
    assert other_kind(photos(tmp_path)) == "images"
    for name, (rows, *_) in KINDS.items():
        assert other_kind(Path(write(tmp_path / name, rows))) is None, name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cuda"], "--device cuda: no GPU is visible"),
        (["--batch-sizes", "--steps", "2"], "--batch-sizes needs at least one value"),
        (["--device", "tpu"], "'tpu' is not one of"),
        (["--data-path", "gone.csv"], "gone.csv is not there"),
        (
            ["--batch-sizes", "8", "many"],
            "benchmark.batch_sizes.1: should be an integer",
        ),
        (
            ["--data-path", "images"],
            "kedro run --env=images --params=images.path=images,"
            "images.size=64,images.channels=3 (--pipelines=images,benchmark measures)",
        ),
        (["--steps", "1"], "1 is not in the range x>=2"),
        (["--batch-sizes", "8", "-1"], "benchmark.batch_sizes.1: should be greater"),
        (["--num-workers", "-2"], "benchmark.num_workers.0: should be greater"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, said, monkeypatch, tmp_path):
    photos(tmp_path).rename(tmp_path / "images")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = CliRunner().invoke(cli.flatout, ["benchmark", *arguments])
    assert done.exit_code in (2, 3)
    assert said in " ".join(done.output.split())


@pytest.mark.process
def test_it_is_a_run_on_the_file_with_these_parameters(tmp_path, monkeypatch):
    """The parameter check refuses one of the values, so nothing is measured."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # --device cpu sets it permanently
    conf = copied_conf(tmp_path)
    file = write(tmp_path / "reviews.csv", KINDS["reviews.csv"][0])
    where = (f"--conf-source={conf}", f"--data-dir={tmp_path / 'data'}")
    (conf / "base/parameters_detect.yml").write_text("detect: {none: 1}")
    lists = ("--batch-sizes", "8", "--device", "cpu", "--pin-memory", "false")
    asked = ("flatout", "benchmark", "--data-path", str(file), *lists, *where)
    done = kedro(*asked)
    assert done.returncode == 2, done.stdout
    assert "review is the text, stars has 5 classes" in done.stdout
    assert "kedro run --pipelines=split,tokenize,benchmark, mode grid" in done.stdout
    assert "--pin-memory is not tried, because no GPU is visible." in done.stdout
    assert "detect.none: unknown parameter" in done.stdout
    catalog = yaml.safe_load((conf / "local/catalog.yml").read_text())
    assert catalog["raw_texts"]["filepath"] == str(file)
    again = kedro(*asked)
    assert "detect.none: unknown parameter" in again.stdout, "goes on as far"
    parameters = (conf / "local/parameters.yml").read_text()
    other = CliRunner().invoke(cli.cli, [*asked, "--task", "regression"])
    assert "parameters.yml would be replaced" in other.output
    assert (conf / "local/parameters.yml").read_text() == parameters
