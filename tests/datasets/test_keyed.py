"""Stored results are kept if unchanged, recreated with a reason, and never partial."""

import json
import resource
import signal
import textwrap
from dataclasses import dataclass

import datasets
import pandas as pd
import pyarrow as pa
import pytest
from kedro.io import DatasetError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from flatout.datasets import (
    KeyedArrowDataset,
    KeyedJSONDataset,
    KeyedParquetDataset,
    TokenizerFolder,
)
from flatout.engine.files import atomic_write
from flatout.engine.files.arrow_folder import ArrowRecipe
from flatout.engine.files.content_key import ContentKey
from flatout.engine.files.keyed_folder import is_current
from tests.projects import interrupted

SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("length", pa.int32())])


@dataclass(frozen=True)
class Rows(ArrowRecipe):
    """A recipe of `count` rows, which counts how often it is executed."""

    key: ContentKey
    count: int
    runs: list

    schema = SCHEMA

    def batches(self):
        self.runs.append(1)
        for start in range(0, self.count, 1000):
            ids = [
                [i] * (1 + i % 3) for i in range(start, min(start + 1000, self.count))
            ]
            lengths = list(map(len, ids))
            yield pa.RecordBatch.from_arrays(
                [pa.array(ids, pa.list_(pa.int32())), pa.array(lengths, pa.int32())],
                schema=SCHEMA,
            )


def recipe(count=2500, **fields):
    return Rows(ContentKey({"rows": count, **fields}), count, [])


def test_what_is_written_is_what_datasets_writes(tmp_path):
    dataset = KeyedArrowDataset(filepath=str(tmp_path / "tokens"))
    dataset.save(recipe())
    loaded = datasets.load_from_disk(str(tmp_path / "tokens"))
    recipe().to_dataset().save_to_disk(str(tmp_path / "theirs"))
    theirs = datasets.load_from_disk(str(tmp_path / "theirs"))
    assert loaded.features == theirs.features
    assert loaded.data.table.equals(theirs.data.table)
    mine, other = (
        json.loads((tmp_path / name / "state.json").read_text())
        for name in ("tokens", "theirs")
    )
    assert {**mine, "_fingerprint": ""} == {**other, "_fingerprint": ""}
    assert dataset.load().data.table.equals(theirs.data.table)


def test_unchanged_rows_are_kept_and_it_says_so(tmp_path, caplog):
    caplog.set_level("DEBUG", "flatout")
    dataset = KeyedArrowDataset(filepath=str(tmp_path / "train_tokens"))
    dataset.save(recipe())
    again = recipe()
    dataset.save(again)
    assert again.runs == []
    assert "train_tokens: unchanged, kept" in caplog.text


def test_a_changed_key_names_the_field_and_replaces_the_folder(tmp_path, caplog):
    caplog.set_level("DEBUG", "flatout")
    dataset = KeyedArrowDataset(filepath=str(tmp_path / "train_tokens"))
    dataset.save(recipe(100, max_length=320))
    dataset.save(recipe(100, max_length=128))
    assert "train_tokens: made again (max_length: 320 -> 128" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["train_tokens"]


@pytest.mark.parametrize("damage", ["cut", "gone", "no key"])
def test_a_damaged_folder_is_made_again(tmp_path, damage):
    dataset = KeyedArrowDataset(filepath=str(tmp_path / "tokens"))
    dataset.save(recipe())
    file = next((tmp_path / "tokens").glob("*.arrow"))
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:100])
    elif damage == "gone":
        file.unlink()
    else:
        (tmp_path / "tokens" / "flatout_key.json").write_text("{")
    again = recipe()
    dataset.save(again)
    assert again.runs == [1] and len(dataset.load()) == 2500


def test_readers_keep_the_rows_they_mapped(tmp_path):
    dataset = KeyedArrowDataset(filepath=str(tmp_path / "tokens"))
    dataset.save(recipe(10))
    mapped = dataset.load()
    dataset.save(recipe(20))
    assert len(mapped) == 10 and mapped[9]["input_ids"] == [9]


def test_no_rows_at_all_is_still_a_data_set(tmp_path):
    dataset = KeyedArrowDataset(filepath=str(tmp_path / "tokens"))
    dataset.save(recipe(0))
    assert len(dataset.load()) == 0


def test_loading_what_is_not_there_says_what_to_run(tmp_path):
    with pytest.raises(DatasetError, match="kedro run --pipelines=split,tokenize"):
        KeyedArrowDataset(filepath=str(tmp_path / "tokens")).load()


def test_something_else_is_refused(tmp_path):
    rows = datasets.Dataset.from_dict({"text": list("abcd")})
    with pytest.raises(DatasetError, match=r"ArrowDataset for a datasets\.Dataset"):
        KeyedArrowDataset(filepath=str(tmp_path / "tokens")).save(rows)


def test_a_full_disk_leaves_what_was_there(tmp_path):
    dataset = KeyedArrowDataset(filepath=str(tmp_path / "tokens"))
    dataset.save(recipe(10))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(DatasetError) as error:
            dataset.save(recipe(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(error.value) == (
        f"{tmp_path / 'tokens'} could not be written: the disk is full (or a limit on "
        "file size was reached). It is unchanged. Free space, or keep the "
        "data elsewhere with --params=data_dir=/another/disk"
    )
    left = [p.name for p in tmp_path.iterdir() if ".writing-" not in p.name]
    assert left == ["tokens"]
    assert len(dataset.load()) == 10


KILLED = """
    import pathlib, sys, time
    import pyarrow as pa
    from flatout.engine.files.arrow_folder import ArrowRecipe, write_recipe
    from flatout.engine.files.content_key import ContentKey

    class Slow(ArrowRecipe):
        key = ContentKey({"rows": 9})
        schema = pa.schema([("length", pa.int32())])
        def batches(self):
            for _ in range(9):
                numbers = pa.array(range(1 << 20), pa.int32())
                yield pa.record_batch([numbers], schema=self.schema)
            print("halfway", flush=True)
            time.sleep(60)

    write_recipe(pathlib.Path(sys.argv[1]), Slow())
"""


@pytest.mark.process
def test_a_killed_writer_leaves_the_old_rows_and_no_rubbish(tmp_path, monkeypatch):
    dataset = KeyedArrowDataset(filepath=str(tmp_path / "tokens"))
    dataset.save(recipe(10))
    log = tmp_path.with_name(f"{tmp_path.name} log")
    arguments = ["-c", textwrap.dedent(KILLED), str(tmp_path / "tokens")]
    log.touch()
    halfway = lambda: "halfway" in log.read_text()  # noqa: E731
    assert interrupted(arguments, log, halfway, signal.SIGKILL) == -signal.SIGKILL
    (half,) = tmp_path.glob(".tokens.writing-*")
    assert not is_current(half, ContentKey({"rows": 9}))
    assert len(dataset.load()) == 10
    monkeypatch.setattr(atomic_write, "ABANDONED_S", 0.0)  # as on the next day
    dataset.save(recipe(20))
    assert [p.name for p in tmp_path.iterdir()] == ["tokens"]
    assert len(dataset.load()) == 20


@dataclass(frozen=True)
class Value:
    key: ContentKey
    found: dict

    def value(self):
        return self.found

    def table(self):
        return pa.table(self.found)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (
            KeyedJSONDataset,
            {"rows": 3, "word": "\ud55c"},
            {"rows": 3, "word": "\ud55c"},
        ),
        (KeyedParquetDataset, {"row": [1, 2]}, pd.DataFrame({"row": [1, 2]})),
    ],
)
def test_single_files_hold_their_key(tmp_path, caplog, kind, value, expected):
    caplog.set_level("DEBUG", "flatout")
    dataset = kind(filepath=str(tmp_path / "new" / "report.file"))
    dataset.save(Value(ContentKey({"a": 1}), value))
    dataset.save(Value(ContentKey({"a": 1}), {"never": ["written"]}))
    assert "report: unchanged, kept" in caplog.text
    loaded = dataset.load()
    assert (
        loaded.equals(expected) if kind is KeyedParquetDataset else loaded == expected
    )
    dataset.save(Value(ContentKey({"a": 2}), value))
    assert "report: made again (a: 1 -> 2" in caplog.text


def test_a_plain_value_is_refused_with_the_type_to_write(tmp_path):
    entry = KeyedJSONDataset(filepath=str(tmp_path / "token_report.json"))
    with pytest.raises(DatasetError, match=r"plain dict.* such as json\.JSONDataset"):
        entry.save({"train": {"rows": 1}})


def test_missing_files_say_so(tmp_path):
    for kind in (KeyedJSONDataset, KeyedParquetDataset):
        with pytest.raises(DatasetError, match="is not there: run the pipeline"):
            kind(filepath=str(tmp_path / "no.file")).load()


def test_a_tokenizer_that_is_saved_again_says_nothing_of_how_it_was_loaded(tmp_path):
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    plain = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a")
    plain.save_pretrained(tmp_path / "one")
    loaded = TokenizerFolder(filepath=str(tmp_path / "one")).load()
    loaded.save_pretrained(tmp_path / "two")
    first, second = (
        json.loads((tmp_path / name / "tokenizer_config.json").read_text())
        for name in ("one", "two")
    )
    assert first == second
    assert not {"is_local", "local_files_only"} & second.keys()
