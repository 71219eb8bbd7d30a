"""Two runs that use the same data folder."""

import shutil
from types import SimpleNamespace

import pytest
from datasets import load_from_disk
from filelock import FileLock, Timeout
from kedro.io import DataCatalog
from kedro.pipeline import Pipeline

from flatout.engine.parameters import SettingsError, parse_settings
from flatout.engine.tokenizing.token_keys import keys_of, warn_if_replaced
from flatout.pipelines import boxed, evaluate, predict, split, tokenize, train
from flatout.project.hooks import DataHooks, Run
from tests.conftest import kedro


class Begun(Run):
    def __init__(self, folder, is_main):
        self.settings, self.data, self._is_main = parse_settings({}), folder, is_main
        self.loader = SimpleNamespace(this_run=dict)

    is_main = property(lambda self: self._is_main)


def hooks_of(folder, *, main=True):
    return DataHooks(Begun(folder, main))


def begin(hooks, pipeline=None):
    """Begin a run of `pipeline`, a module. Without a pipeline, nothing runs."""
    made = Pipeline([])
    if pipeline:
        name = pipeline.__name__.rpartition(".")[2]
        made = boxed(name, pipeline.create_pipeline())
    hooks.after_catalog_created(catalog := DataCatalog(), {})
    hooks.before_pipeline_run(made, catalog)


def is_free(folder) -> bool:
    try:
        FileLock(folder / ".lock").acquire(timeout=0).lock.release()
    except Timeout:
        return False
    return True


@pytest.mark.parametrize("made", [split, tokenize, train, evaluate])
def test_a_run_has_its_data_folder_for_itself(tmp_path, made):
    hooks = hooks_of(tmp_path)
    begin(hooks, made)
    assert not is_free(tmp_path)
    with pytest.raises(SettingsError, match="another run works in"):
        begin(hooks_of(tmp_path), made)
    begin(hooks_of(tmp_path), predict)
    begin(hooks_of(tmp_path))
    begin(hooks_of(tmp_path, main=False), made)
    begin(hooks_of(tmp_path / "other"), made)
    begin(hooks, made)  # after a run that another hook refused
    hooks.after_pipeline_run(Pipeline([]))
    assert is_free(tmp_path)
    begin(hooks, made)
    hooks.on_pipeline_error()
    assert is_free(tmp_path)


def test_a_folder_that_cannot_be_locked_does_not_stop_a_run(tmp_path):
    (tmp_path / "file").write_text("")
    hooks = hooks_of(tmp_path / "file/data")
    begin(hooks, train)
    hooks.after_pipeline_run(Pipeline([]))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.process
def test_a_second_terminal_is_told_to_wait(data):
    with FileLock(data / ".lock"):
        done = kedro(
            *("run", "--env=test", "--pipelines=split,tokenize"),
            f"--params=data_dir={data}",
        )
    assert done.returncode in (2, 3)
    said = " ".join(done.stdout.partition("Error: ")[2].split())
    assert said.startswith(f"another run works in {data}: wait for its end")
    assert not (data / "05_model_input").exists()


def test_rows_that_are_replaced_below_a_training_are_told_of(tmp_path, caplog):
    rows = {}
    for name, key in (("train", "a"), ("test", "b")):
        folder = tmp_path / name
        keyed_rows(folder, key)
        rows[name] = load_from_disk(str(folder))
    begun = keys_of(rows)
    warn_if_replaced(begun, rows)
    assert not caplog.records
    shutil.rmtree(tmp_path / "test")
    keyed_rows(tmp_path / "test", "c")
    warn_if_replaced(begun, rows)
    assert "the rows of test were replaced while the training ran" in caplog.text


def keyed_rows(folder, key):
    """Write two token rows with a content key."""
    import pyarrow as pa

    from flatout.datasets import KeyedArrowDataset
    from tests.make import TableRecipe

    recipe = TableRecipe(pa.table({"input_ids": [[1], [2]], "key": [key, key]}))
    KeyedArrowDataset(filepath=str(folder)).save(recipe)
