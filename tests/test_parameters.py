"""Parameters from conf/ to the nodes: what is shown, filled in and refused."""

import runpy
import shutil

import pytest
import yaml

from flatout.engine.parameters import Settings, SettingsError
from flatout.project.command_line import CommandError
from flatout.project.config_loader import loader_of
from flatout.project.parameters import table as tables
from tests.conftest import PROJECT, kedro
from tests.projects import context_of, copied_conf, ran


def loader(environment: str | None = None, **parameters):
    return loader_of(context_of(environment, runtime_params=parameters))


SHOWN = {
    "split.text_column",
    "corpus.rows",
    "corpus.labels",
    "split.label_column",
    "model.task",
    "model.name_or_path",
    "tokenize.max_length",
    "train.global_batch_size",
    "train.learning_rate",
    "train.epochs",
    "train.token_budget",
    "runtime.precision",
}
OF_ONES_OWN = ("model.config", "sweep.grid", "model.overrides", "runtime.environment")
PLACES = {
    "data_dir",
    "paths.best",
    "paths.tuned",
    "benchmark.folder",
    "export.folder",
    "mine.folder",
    "sweep.folder",
    "sweep.storage",
    "paths.checkpoints",
    "paths.metrics",
}


def leaves(tree: dict, prefix: str = "") -> set[str]:
    found = set()
    for key, value in tree.items():
        is_group = isinstance(value, dict) and f"{prefix}{key}" not in OF_ONES_OWN
        found |= leaves(value, f"{prefix}{key}.") if is_group else {f"{prefix}{key}"}
    return found


def test_base_shows_the_parameters_that_matter():
    written = yaml.safe_load((PROJECT / "conf/base/parameters.yml").read_text())
    assert leaves(written) == SHOWN | PLACES | {"model.config", "sweep.grid"}


def test_nodes_and_mlflow_get_every_parameter_all_the_same():
    context = context_of("local", runtime_params={"train": {"log_every": 7}})
    given, known = context.config_loader["parameters"], Settings().model_dump()
    unset = {"data_dir", "tuned", "pipelines"}
    assert leaves(given) >= leaves(known) - unset
    assert given["train"]["log_every"] == 7
    assert given["runtime"]["environment"] == known["runtime"]["environment"]
    assert context.catalog.load("params:benchmark")["steps_per_trial"] == 20


def test_a_misspelt_parameter_that_base_does_not_list_is_refused():
    with pytest.raises(SettingsError, match=r"did you mean train\.loader\.num_workers"):
        loader("local", train={"loader": {"num_worker": 2}})
    with pytest.raises(SettingsError, match=r"train\.log_every: should be"):
        loader("local", train={"log_every": 0})


def test_the_page_of_all_parameters_is_current():
    script = runpy.run_path(str(PROJECT / "docs/parameters_page.py"))
    page = (PROJECT / "docs/parameters.md").read_text(encoding="utf-8")
    made = script["page"](loader())
    assert made == page, "make it again: python docs/parameters_page.py"
    assert [p.path for p in script["described"]() if not p.meaning] == []


@pytest.fixture(scope="module")
def shown():
    """Return the words of each line about `train`."""
    given = {"log_every": 9, "strategy": "grouped"}
    text = tables.table(loader("test", train=given), "train")
    return [line.split() for line in text.splitlines()]


@pytest.mark.parametrize(
    ("path", "value", "source"),
    [
        ("train.log_every", "9", "command line"),
        ("train.max_steps", "8", "conf/test"),
        ("train.learning_rate", "0.001", "conf/base"),
        ("train.batching", "grouped", "command line"),  # given by its earlier name
        ("train.weight_decay", "0.01", "default"),
        ("train.loader.num_workers", "0", "conf/test"),
    ],
)
def test_a_parameter_is_shown_with_its_source(shown, path, value, source):
    assert [path, value, *source.split()] in shown


def test_all_parameters_fit_100_columns_with_their_values():
    grid = {"train.learning_rate": [1e-5 * n for n in range(1, 30)]}
    shown = tables.table(loader("test", sweep={"grid": grid}), None)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 100
    place = next(i for i, line in enumerate(lines) if line.startswith("sweep.grid "))
    assert lines[place].split() == ["sweep.grid", "command", "line"]
    assert lines[place + 1].startswith('    {"train.learning_rate": [1e-05, ')


def test_a_group_that_does_not_exist_is_answered_with_the_nearest():
    with pytest.raises(CommandError, match=r"no group trian; did you mean train\?"):
        tables.check_group("trian")


@pytest.fixture
def conf(tmp_path):
    """The project's configuration, with an environment `rows` that is like `test` but
    only splits."""
    folder = copied_conf(tmp_path)
    shutil.copytree(folder / "test", folder / "rows")
    with (folder / "rows/parameters.yml").open("a") as file:
        file.write("\npipelines: [split]\n")
    return folder


def test_an_environment_names_the_pipelines_of_a_bare_run(conf, data):
    options = (f"--conf-source={conf}", f"--params=data_dir={data}")
    ran("run", "--env=rows", *options)
    assert (data / "03_primary/train_rows").is_dir()
    assert not (data / "05_model_input").exists()
    ran("run", "--env=rows", "--pipelines=tokenize", *options)  # asked: wins
    assert (data / "05_model_input/train_tokens").is_dir()


def test_a_pipeline_that_an_environment_misspells_is_refused(conf):
    file = conf / "rows/parameters.yml"
    file.write_text(file.read_text().replace("[split]", "[spilt]"))
    done = kedro("run", "--env=rows", f"--conf-source={conf}")
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1] == (
        "Error: parameter pipelines: no pipeline spilt; did you mean split?"
    )
