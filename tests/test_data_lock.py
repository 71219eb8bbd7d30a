"""Two runs on one data folder."""

from __future__ import annotations

import shutil

import pytest
from datasets import load_from_disk
from filelock import FileLock, Timeout
from kedro.pipeline import Pipeline

from flatout.engine.parameters import SettingsError
from flatout.engine.tokenizing.token_keys import keys_of, tell_replaced
from flatout.pipelines import evaluate, predict, split, tokenize, train
from flatout.project.data_lock import DataLockHooks
from tests.conftest import kedro


def hooks_of(folder, *, main=True):
    hooks = DataLockHooks()
    hooks._folder, hooks._is_main = folder, main
    return hooks


def is_free(folder) -> bool:
    try:
        FileLock(folder / ".lock").acquire(timeout=0).lock.release()
    except Timeout:
        return False
    return True


@pytest.mark.parametrize("made", [split, tokenize, train, evaluate])
def test_a_run_has_its_data_folder_for_itself(tmp_path, made):
    pipeline, hooks = made.create_pipeline(), hooks_of(tmp_path)
    hooks.before_pipeline_run(pipeline)
    assert not is_free(tmp_path)
    with pytest.raises(SettingsError, match=r"another run works in .* since \d\d:"):
        hooks_of(tmp_path).before_pipeline_run(pipeline)
    hooks_of(tmp_path).before_pipeline_run(predict.create_pipeline())
    hooks_of(tmp_path).before_pipeline_run(Pipeline([]))
    hooks_of(tmp_path, main=False).before_pipeline_run(pipeline)
    hooks_of(tmp_path / "other").before_pipeline_run(pipeline)
    hooks.before_pipeline_run(pipeline)  # after a run that another hook refused
    hooks.after_pipeline_run()
    assert is_free(tmp_path)
    hooks.before_pipeline_run(pipeline)
    hooks.on_pipeline_error()
    assert is_free(tmp_path)


def test_a_folder_that_cannot_be_locked_does_not_stop_a_run(tmp_path):
    (tmp_path / "file").write_text("")
    hooks = hooks_of(tmp_path / "file/data")
    hooks.before_pipeline_run(train.create_pipeline())
    hooks.after_pipeline_run()


@pytest.mark.process
def test_a_second_terminal_is_told_who_works_there(data):
    with FileLock(data / ".lock"):
        (data / ".lock.txt").write_text("kedro run --pipelines=train, process 7")
        done = kedro(
            *("run", "--env=test", "--pipelines=split,tokenize"),
            f"--params=data_dir={data}",
        )
    assert done.returncode in (2, 3)
    said = " ".join(done.stdout.partition("Error: ")[2].split())
    assert said.startswith(f"another run works in {data} (kedro run --pipelines=train")
    assert "wait for its end" in said and not (data / "05_model_input").exists()


def test_rows_that_are_replaced_below_a_training_are_told_of(tmp_path, caplog):
    rows = {}
    for name, key in (("train", "a"), ("test", "b")):
        folder = tmp_path / name
        keyed_rows(folder, key)
        rows[name] = load_from_disk(str(folder))
    begun = keys_of(rows)
    tell_replaced(begun, rows)
    assert not caplog.records
    shutil.rmtree(tmp_path / "test")
    keyed_rows(tmp_path / "test", "c")
    tell_replaced(begun, rows)
    assert "the rows of test were replaced while the training ran" in caplog.text


def keyed_rows(folder, key):
    """Two rows of tokens under a key."""
    import pyarrow as pa

    from flatout.datasets import KeyedArrowDataset
    from flatout.engine.files.arrow_folder import TableRecipe

    recipe = TableRecipe(pa.table({"input_ids": [[1], [2]], "key": [key, key]}))
    KeyedArrowDataset(filepath=str(folder)).save(recipe)
