"""Sessions of log keys: which are read, in which order, and why others are rejected."""

import re

import pandas as pd
import pyarrow as pa
import pytest
from kedro.io import DatasetError

from flatout.datasets import LogSessions, SyntheticSessions
from flatout.engine.data.raw_texts import RawTextsError, open_raw_texts
from tests.make import text_recipes

LOG = [  # LineId, Content, EventId
    (1, "Receiving block blk_-16 src /10.2", "E5"),
    (2, "allocateBlock /jobs blk_7", "E22"),
    (3, "Receiving block blk_7 and blk_7", "E5"),
    (4, "PacketResponder terminating", "E11"),
    (5, "ask to delete blk_-16 blk_7 blk_9", "E23"),
    (6, "Received blk_7", ""),
]


def structured(folder, rows=LOG):
    """Write a file in the format of loghub's parser."""
    path = folder / "HDFS.log_structured.csv"
    pd.DataFrame(rows, columns=["LineId", "Content", "EventId"]).to_csv(
        path, index=False
    )
    return path


def read(entry):
    """Return sessions as (name, keys, label), and broken lines as (row, reason)."""
    raw = open_raw_texts(entry.load())
    sessions, broken = [], []
    for batch in raw.batches(raw.column_names):
        columns = (batch.columns[name].to_pylist() for name in raw.column_names)
        sessions += zip(*columns, strict=True)
        broken += [(fault.row, fault.reason) for fault in batch.broken]
    return sessions, broken


def test_lines_of_a_structured_log_are_put_together_by_session(tmp_path):
    """A line may have several sessions. Lines without a session or a key are
    reported."""
    sessions, broken = read(LogSessions(filepath=str(structured(tmp_path))))
    assert sessions == [
        ("blk_-16", "E5 E23", None),
        ("blk_7", "E22 E5 E23", None),
        ("blk_9", "E23", None),
    ]
    assert broken == [(3, "Content names no session"), (5, "EventId is empty")]


def test_labels_come_from_a_file_of_their_own(tmp_path):
    """Sessions that are missing in the file are rejected. All others are kept."""
    (tmp_path / "anomaly_label.csv").write_text(
        "BlockId,Label\nblk_-16,Normal\nblk_7,Anomaly\n"
    )
    entry = LogSessions(
        filepath=str(structured(tmp_path)),
        label_filepath=str(tmp_path / "anomaly_label.csv"),
    )
    sessions, broken = read(entry)
    assert [(name, label) for name, _, label in sessions] == [
        ("blk_-16", "normal"),
        ("blk_7", "abnormal"),
    ]
    assert (4, "session has no label in anomaly_label.csv") in broken


def test_a_column_of_the_log_may_hold_sessions_and_labels(tmp_path):
    rows = [("a", "E1", "-"), ("b", "E 2", "-"), ("a", "E3", "KERNDTLB")]
    path = tmp_path / "log.parquet"
    pd.DataFrame(rows, columns=["Node", "Key", "Alert"]).to_parquet(path)
    entry = LogSessions(
        filepath=str(path),
        key_column="Key",
        session_column="Node",
        session_pattern=None,
        label_column="Alert",
    )
    sessions, broken = read(entry)
    assert sessions == [("a", "E1 E3", "abnormal"), ("b", "E_2", "normal")]
    assert not broken


def test_a_session_a_line(tmp_path):
    normal, abnormal = tmp_path / "hdfs_train", tmp_path / "hdfs_test_abnormal"
    normal.write_bytes(b"5 5 22\n\n9\n\xff\n5 5 22 \n")
    abnormal.write_text("22 22\n")
    both = LogSessions(filepath=str(normal), abnormal_filepath=str(abnormal))
    sessions, broken = read(both)
    assert sessions == [
        ("hdfs_train:1", "5 5 22", "normal"),
        ("hdfs_train:3", "9", "normal"),
        ("hdfs_train:5", "5 5 22", "normal"),
        ("hdfs_test_abnormal:1", "22 22", "abnormal"),
    ]
    assert broken == [(1, "session has no key"), (3, "line is not valid UTF-8")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_column": "EventID"}, "key_column is 'EventID'.*did you mean 'EventId'"),
        ({"session_column": "Block"}, "session_column is 'Block', which is not there"),
        ({"label_column": "Label"}, "label_column is 'Label', which is not there"),
        ({"session_pattern": "task_[0-9]+"}, "'task_.*' is found in no line of Cont"),
    ],
)
def test_what_is_not_there_is_named(tmp_path, options, message):
    entry = LogSessions(filepath=str(structured(tmp_path)), **options)
    with pytest.raises(RawTextsError, match=message) as caught:
        read(entry)
    assert re.search(r"structured\.csv.*conf/local/catalog\.yml", str(caught.value))


def test_a_pattern_that_is_none_is_refused_by_the_entry():
    with pytest.raises(
        DatasetError, match=r"session_pattern: 'blk_\(' is not a regular"
    ):
        LogSessions(filepath="x.csv", session_pattern="blk_(")


def test_parts_are_the_whole_and_train_has_no_abnormal_session():
    whole, train, rest = (
        SyntheticSessions(sessions=500, part=part).load()
        for part in ("all", "train", "rest")
    )
    names = [part.column("session").to_pylist() for part in (train, rest, whole)]
    assert sorted(names[0] + names[1]) == sorted(names[2]) and len(names[2]) == 500
    assert set(train.column("label").to_pylist()) == {"normal"}
    abnormal = whole.column("label").to_pylist().count("abnormal")
    assert rest.column("label").to_pylist().count("abnormal") == abnormal > 10
    assert 0.7 * 500 < len(train) < 0.85 * 500
    assert whole.equals(SyntheticSessions(sessions=500).load())
    assert not whole.equals(SyntheticSessions(sessions=500, seed=1).load())
    assert all(name.startswith("synthetic-") for name in names[2])


def test_repeated_sessions_stay_and_broken_lines_are_in_quarantine(tmp_path):
    """Each session is in one split, which its name determines."""
    path = tmp_path / "sessions"
    path.write_text("".join(f"1 2 {n % 3}\n" for n in range(300)) + "\n")
    raw = LogSessions(filepath=str(path)).load()
    own = {"label_column": None, "group_column": "session"}
    recipes = text_recipes(raw, "next-key", **own, keep_duplicates=True)
    names = ("train_rows", "validation_rows", "test_rows")
    rows = [pa.Table.from_batches(recipes[name].batches()) for name in names]
    assert sum(map(len, rows)) == 300 and min(map(len, rows)) > 10
    (rejected,) = recipes["rejected_rows"].table().to_pylist()
    assert rejected["row"] == 300
    assert rejected["reason"] == "session has no key"
    report = recipes["split_report"].value()
    assert report["duplicates"] == 0 and report["texts_in_two_splits"] == 3
    dropped = text_recipes(raw, "next-key", **own)
    assert len(dropped["rejected_rows"].table()) == 1
