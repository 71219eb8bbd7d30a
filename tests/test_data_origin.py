"""Training is refused if its tokens come from other data than raw_texts, and only
then."""

import logging
import os
import shutil
from types import SimpleNamespace

import fsspec
import pandas as pd
import pytest
from kedro.framework.hooks.manager import _create_hook_manager
from kedro.io import AbstractDataset, DataCatalog
from kedro.runner import SequentialRunner
from kedro_datasets.pandas import CSVDataset

from flatout.datasets import DocstringCorpus, TextFiles
from flatout.doctor.data import rows as doctor_on_rows
from flatout.engine.parameters import parse_settings
from flatout.engine.tokenizing.token_keys import StaleTokensError
from flatout.pipelines.benchmark import create_pipeline as benchmark
from flatout.pipelines.split import create_pipeline as split
from flatout.pipelines.sweep import create_pipeline as sweep
from flatout.pipelines.tokenize import create_pipeline as tokenize
from flatout.pipelines.train import create_pipeline as train
from flatout.project.hooks import DataHooks, Run
from tests.pipelines.tokens import ARROWS, text_catalog


class Project:
    """Runs split and tokenize on a data folder, with the hooks of a session."""

    def __init__(self, folder, raw, task="sequence-classification", **options):
        self.folder = folder
        parameters = {
            "split": options,
            "model": {"task": task, "config": {"model_type": "bert"}},
            "tokenize": {"vocab_size": 100, "max_length": 16},
        }
        self.settings = parse_settings(parameters)
        entry = TextFiles(filepath=str(raw)) if isinstance(raw, os.PathLike) else raw
        self.catalog = text_catalog(folder, self.settings, raw_texts=entry)

    def run(self, *pipelines):
        for create_pipeline in pipelines:
            run, pipeline = Run(), create_pipeline()
            run.settings, run.data = self.settings, self.folder
            run.loader = SimpleNamespace(this_run=dict)
            hooks = DataHooks(run)
            hooks.after_catalog_created(self.catalog, {})
            hooks.before_pipeline_run(pipeline, self.catalog)
            if create_pipeline in (split, tokenize):
                manager = _create_hook_manager()
                manager.register(hooks)
                SequentialRunner().run(pipeline, self.catalog, hook_manager=manager)

    def refusal(self, pipeline=train):
        """Return the error message of a training run."""
        with pytest.raises(StaleTokensError) as error:
            self.run(pipeline)
        return str(error.value)


def write(path, word, count=120):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{word} number {i},{i % 2}" for i in range(count)]
    path.write_text("\n".join(["text,label", *lines]))
    return path


@pytest.fixture
def made(tmp_path):
    """A project whose tokens were created from numbers.csv."""
    project = Project(tmp_path / "data", write(tmp_path / "numbers.csv", "one"))
    project.run(split, tokenize, train)
    return project


def test_the_log_names_the_data(tmp_path, caplog):
    project = Project(tmp_path / "data", write(tmp_path / "numbers.csv", "one"))
    with caplog.at_level(logging.INFO, "flatout"):
        project.run(split)
    assert caplog.messages[0] == "raw_texts: numbers.csv"


def tokenize_and_train():
    """Return pipelines that tokenize the existing rows and train."""
    return tokenize() + train()


@pytest.mark.parametrize("pipeline", [train, benchmark, sweep, tokenize_and_train])
def test_another_file_is_refused(made, tmp_path, pipeline):
    other = write(tmp_path / "reviews.csv", "two")
    project = Project(tmp_path / "data", other)
    assert project.refusal(pipeline) == (
        "the rows were made from numbers.csv, and raw_texts is now reviews.csv with "
        "another catalog entry, or with files of other sizes, times or inodes: run "
        "kedro run --pipelines=split,tokenize with the same --env and --params, or "
        "set raw_texts back"
    )
    found = doctor_on_rows(project.catalog, project.settings)
    assert (found.status, found.finding) == ("warn", project.refusal(pipeline))
    project.run(split, tokenize, pipeline)
    assert doctor_on_rows(project.catalog, project.settings).status == "ok"


def test_a_file_without_the_columns_is_refused(made, tmp_path):
    other = tmp_path / "reviews.csv"
    other.write_text("review,stars\ngood,5\n")
    assert "raw_texts is now reviews.csv" in Project(tmp_path / "data", other).refusal()


def test_a_split_behind_which_no_tokenize_ran_is_refused(made, tmp_path):
    project = Project(tmp_path / "data", write(tmp_path / "reviews.csv", "two"))
    project.run(split)
    assert project.refusal() == (
        "the tokens were created from different rows than the last split: run kedro "
        "run, or kedro run --pipelines=tokenize"
    )
    project.run(tokenize, train)


@pytest.mark.parametrize("of_the_same_time", [False, True])
def test_rows_that_were_edited_are_refused(made, tmp_path, of_the_same_time):
    """The edited file has the same size and name as the original."""
    times = (tmp_path / "numbers.csv").stat()
    raw = write(tmp_path / "numbers.csv", "two")
    if of_the_same_time:
        os.utime(raw, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert "is now numbers.csv with another" in made.refusal()


def test_another_task_is_refused(made, tmp_path):
    """The file is unchanged, but different columns are read."""
    project = Project(tmp_path / "data", tmp_path / "numbers.csv", task="masked-lm")
    assert 'split.label_column: "label" -> null' in project.refusal()


@pytest.mark.parametrize("change", ["touched", "copied beside"])
def test_equal_content_needs_a_split_that_keeps_the_rows(made, tmp_path, change):
    raw = tmp_path / "numbers.csv"
    if change == "touched":
        os.utime(raw, (1, 1))
    else:
        raw = write(tmp_path / "deep" / "numbers.csv", "one")
    project = Project(tmp_path / "data", raw)
    assert "with files of other sizes, times or inodes" in project.refusal()
    arrows = {f: f.stat().st_ino for f in (tmp_path / "data").rglob("*.arrow")}
    project.run(split, train)
    assert arrows == {f: f.stat().st_ino for f in (tmp_path / "data").rglob("*.arrow")}
    assert arrows


def test_without_tokens_nothing_is_said_of_their_origin(tmp_path, caplog):
    project = Project(tmp_path / "data", write(tmp_path / "numbers.csv", "one"))
    with caplog.at_level(logging.INFO):
        project.run(train)
    assert "are trusted" not in caplog.text


def test_other_parameters_of_split_are_refused(made, tmp_path):
    project = Project(tmp_path / "data", tmp_path / "numbers.csv", seed=1)
    assert project.refusal() == (
        "the rows were split with other parameters (then -> now): split.seed: 0 -> 1. "
        "Run kedro run with the same --env and --params, or set the parameters back"
    )
    Project(tmp_path / "data", tmp_path / "numbers.csv", max_rejected_fraction=0.5).run(
        train
    )


@pytest.mark.parametrize("change", ["none", "moved", "copied"])
def test_a_data_folder_elsewhere_is_trained_on(made, tmp_path, change):
    data = tmp_path / "data"
    if change == "moved":
        data = data.rename(tmp_path / "moved data")
    if change == "copied":
        data = shutil.copytree(data, tmp_path / "copy")
    project = Project(data, tmp_path / "numbers.csv")
    before = {f: f.read_bytes() for f in data.rglob("*") if f.is_file()}
    assert doctor_on_rows(project.catalog, project.settings).status == "ok"
    project.run(train)
    assert before == {f: f.read_bytes() for f in data.rglob("*") if f.is_file()}


def test_a_project_that_was_moved_trains_on(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    project = Project(here / "data", write(here / "raw" / "numbers.csv", "one"))
    project.run(split, tokenize)
    here.rename(there)
    moved = Project(there / "data", there / "raw" / "numbers.csv")
    moved.run(train)
    assert doctor_on_rows(moved.catalog, moved.settings).status == "ok"


def test_tokens_alone_are_trained_on(made, tmp_path, caplog):
    """Tokens may be copied to a machine with GPUs without the raw data."""
    for name in ARROWS:
        if name.endswith("rows"):
            shutil.rmtree(tmp_path / "data" / name)
    project = Project(tmp_path / "data", tmp_path / "nowhere.csv")
    with caplog.at_level(logging.INFO, "flatout"):
        project.run(train)
    assert "are not here: the tokens are used unchecked" in caplog.text
    assert doctor_on_rows(project.catalog, project.settings).status == "ok"


@pytest.mark.parametrize(
    "entry",
    [
        TextFiles(filepath="nowhere/numbers.csv"),
        TextFiles(filepath="memory://nowhere/numbers.csv"),
        CSVDataset(filepath="nowhere/numbers.csv"),
        DocstringCorpus(filepath="nowhere", rows=10, labels=2),
    ],
)
def test_raw_data_that_cannot_be_had_is_only_noted(made, tmp_path, entry, caplog):
    project = Project(tmp_path / "data", entry)
    project.run(train)
    assert doctor_on_rows(project.catalog, project.settings).status == "ok"


def test_entries_of_other_kinds_are_compared(tmp_path):
    raw = write(tmp_path / "numbers.csv", "one")
    Project(tmp_path / "data", CSVDataset(filepath=str(raw))).run(split, tokenize)
    Project(tmp_path / "data", CSVDataset(filepath=str(raw))).run(train)
    other = write(tmp_path / "reviews.csv", "two")
    project = Project(tmp_path / "data", CSVDataset(filepath=str(other)))
    assert (
        "made from numbers.csv, and raw_texts is now reviews.csv" in project.refusal()
    )


def test_shards_are_compared_and_the_key_file_stays_small(tmp_path):
    for number in range(20):
        write(tmp_path / "shards" / f"shard_{number}.csv", f"n{number}", count=10)
    project = Project(tmp_path / "data", tmp_path / "shards")
    project.run(split, tokenize, train)
    key_file = tmp_path / "data" / "train_rows" / "flatout_key.json"
    assert "shard_" not in key_file.read_text()
    write(tmp_path / "shards" / "c.csv", "c")
    assert "is now shards with another" in project.refusal()


def test_an_edited_file_behind_a_link_to_a_folder_is_refused(tmp_path):
    shard = write(tmp_path / "far/part.csv", "one")
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/link").symlink_to(tmp_path / "far")
    project = Project(tmp_path / "data", tmp_path / "raw")
    project.run(split, tokenize, train)
    write(shard, "two")
    assert "raw_texts is now raw with another" in project.refusal()


def test_a_url_whose_content_has_changed_is_refused(tmp_path, caplog):
    """The store reports the change. If nothing has changed, nothing is downloaded."""
    store = fsspec.filesystem("memory")
    text = write(tmp_path / "numbers.csv", "one").read_bytes()
    store.pipe_file("/bucket/numbers.csv", text)
    url, cache = "memory://bucket/numbers.csv", str(tmp_path / "fetched")
    project = Project(tmp_path / "data", TextFiles(filepath=url, cache_dir=cache))
    project.run(split, tokenize)
    caplog.clear()
    with caplog.at_level(logging.INFO, "flatout"):
        project.run(train)
    assert "compar" not in caplog.text and "fetching" not in caplog.text
    store.pipe_file("/bucket/numbers.csv", text.replace(b"one", b"two"))
    try:
        assert "is now numbers.csv with another" in project.refusal()
    finally:
        store.rm("/bucket", recursive=True)


class Rows(AbstractDataset):
    """A custom dataset whose description contains secrets."""

    def __init__(self, rows, **described):
        self.rows, self.described = rows, described

    def load(self):
        return self.rows

    def save(self, data): ...

    def _describe(self):
        return {**self.described, "client": f"<Client object at {hex(id(self))}>"}


SECRETS = {"token": "hunter2", "con": "postgresql://me:hunter2@host/db"}


@pytest.mark.parametrize(
    "described", [SECRETS, {"filepath": "https://me:hunter2@host/a.csv?key=hunter2"}]
)
def test_no_secret_of_an_entry_is_kept_beside_the_rows(tmp_path, described):
    """The descriptions of two objects are equal although their memory addresses
    differ."""
    frame = pd.read_csv(write(tmp_path / "numbers.csv", "one"))
    entries = [Rows(frame, **described) for _ in range(2)]
    Project(tmp_path / "data", entries[0]).run(split, tokenize)
    Project(tmp_path / "data", entries[1]).run(train)
    for path in (tmp_path / "data").rglob("*"):
        assert path.is_dir() or b"hunter2" not in path.read_bytes()


def test_an_entry_whose_package_is_missing_is_not_compared(made, tmp_path, caplog):
    project = Project(tmp_path / "data", tmp_path / "numbers.csv")
    catalog = DataCatalog.from_config({"raw_texts": {"type": "no_such_package.Rows"}})
    for name in set(project.catalog.keys()) - {"raw_texts"}:
        catalog[name] = project.catalog[name]
    project.catalog = catalog
    with caplog.at_level(logging.INFO, "flatout"):
        project.run(train)
    assert "raw_texts cannot be opened here" in caplog.text
    assert "NoneType" not in caplog.text
