"""Splits are stable and without leaks, and every row is accounted for."""

import logging

import pandas as pd
import pyarrow as pa
import pytest

from flatout.engine.data import raw_texts
from flatout.engine.data.columns import Columns
from flatout.engine.data.raw_texts import open_raw_texts
from flatout.engine.data.readers.text_files import TextFiles
from flatout.engine.data.rows import REJECTED_SCHEMA
from flatout.engine.data.split import SplitError
from flatout.engine.data.split_recipes import plan_split
from flatout.engine.data.split_report import split_metrics, too_many_text
from flatout.engine.parameters import SplitSettings
from tests.make import text_recipes

CLASSES = Columns("text", None, "label", None)
NAMES = ("train_rows", "validation_rows", "test_rows")


def frame_of(count, labels=3):
    return pd.DataFrame(
        {
            "text": [f"text number {i} of many" for i in range(count)],
            "label": [f"label {i % labels}" for i in range(count)],
        }
    )


def split(data, columns=CLASSES, **options):
    recipes = plan_split(open_raw_texts(data), columns, SplitSettings(**options))
    parts = {name: recipes[name].to_dataset() for name in NAMES}
    return parts, recipes["split_report"].value(), recipes["rejected_rows"].table()


def texts_of(parts):
    return {name: set(rows["text"]) for name, rows in parts.items()}


def test_texts_with_several_labels_are_counted_and_said(caplog):
    frame = frame_of(300)
    other = frame.iloc[10:15].assign(label=["label 0", "odd", "odd", "odd", "odd"])
    again = other.assign(label="label 1")  # row 10 already has the label 1
    rows = pd.concat([frame, other, again, frame.tail(2)], ignore_index=True)
    _, report, _ = split(rows)
    assert (report["duplicates"], report["texts_with_several_labels"]) == (12, 5)
    assert split_metrics(report)["split_texts_with_several_labels"] == 5.0
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warning == (
        "texts that came with several labels: 5 ('label 1' in row 10 and 'label 0' in "
        "row 300; 'label 2' in row 11 and 'odd' in row 301; 'label 0' in row 12 and "
        "'odd' in row 302; ...). The first row of each is used, the others count as "
        "duplicates: give each text one label"
    )
    caplog.clear()
    assert split(frame)[1]["texts_with_several_labels"] == 0
    assert "several labels" not in caplog.text


def test_a_text_with_several_numbers_is_said_too(caplog):
    frame = frame_of(300).assign(label=[index / 8 for index in range(300)])
    other = frame.iloc[[10, 11]].assign(label=[1.25, 9.5])  # row 10 already has 1.25
    rows = pd.concat([frame, other], ignore_index=True)
    columns = Columns("text", None, "label", None, label_type=pa.float64())
    _, report, _ = split(rows, columns)
    assert (report["duplicates"], report["texts_with_several_labels"]) == (2, 1)
    assert "1 (1.375 in row 11 and 9.5 in row 301). The first" in caplog.text
    caplog.clear()
    assert split(rows, columns, keep_duplicates=True)[1]["duplicates"] == 0
    assert "9.5 in row 301). All of these rows are used: give" in caplog.text


def test_every_text_with_both_labels_is_no_wrong_column():
    frame = frame_of(200).assign(label="0")
    with pytest.raises(SplitError) as error:
        split(pd.concat([frame, frame.assign(label="1")], ignore_index=True))
    assert str(error.value) == (
        "every row has the label '0', and a classifier needs two (200 texts came "
        "with other labels too). Add rows of another label, or check "
        "split.label_column and model.task"
    )


def test_near_duplicates_are_counted_and_share_a_split():
    frame = frame_of(300)
    loud = frame.assign(text=frame["text"].str.upper().str.replace(" ", "\n  "))
    parts, report, _ = split(pd.concat([frame, loud], ignore_index=True))
    assert (report["near_duplicates"], report["near_duplicates_in_two_splits"]) == (
        300,
        0,
    )
    for texts in texts_of(parts).values():
        assert {" ".join(t.lower().split()) for t in texts} == {
            t for t in texts if t.islower() and "\n" not in t
        }


def test_groups_are_never_divided_and_a_text_in_two_groups_is_kept_once():
    frame = frame_of(600).assign(who=[f"patient {i % 50}" for i in range(600)])
    columns = Columns("text", None, "label", "who")
    parts, report, _ = split(frame, columns, group_column="who")
    owner = dict(zip(frame["text"], frame["who"], strict=True))
    groups = [{owner[text] for text in texts} for texts in texts_of(parts).values()]
    assert not groups[0] & groups[1] and not groups[1] & groups[2]
    assert report["groups_in_two_splits"] == 0
    again = frame.head(30).assign(who="somebody else")
    _, report, _ = split(pd.concat([frame, again], ignore_index=True), columns)
    assert (report["duplicates"], report["texts_in_two_splits"]) == (30, 0)


def test_pairs_are_the_same_only_if_both_texts_are():
    frame = frame_of(400).assign(other=["p", "q"] * 200)
    frame["text"] = [f"t {i // 2}" for i in range(400)]
    columns = Columns("text", "other", "label", None)
    assert split(frame, columns)[1]["duplicates"] == 0


def test_a_split_that_is_made_says_why_rows_were_rejected(tmp_path, caplog):
    rows = [f"text {i},{'a' if i % 2 else 'b'}" for i in range(500)]
    rows[3], rows[7], rows[9] = "text 3,", "text 7,", ",a"
    file = tmp_path / "reviews.csv"
    file.write_text("\n".join(["text,label", *rows]))
    recipes = text_recipes(TextFiles(file))
    with caplog.at_level(logging.INFO):
        recipes["split_report"].value()
    assert "; 3 rejected, 0 duplicates\n" in caplog.text
    assert "  rejected 2 x label is empty: rows 3, 7 of reviews.csv " in caplog.text
    assert "  rejected 1 x text is empty: rows 9 of reviews.csv" in caplog.text


def test_many_reasons_are_cut_to_the_most_frequent():
    reasons = [f"reason {i:02}" for i in range(30)]
    columns = [["raw_texts"] * 30, range(30), reasons, ["it's"] * 30]
    rejected = pa.table(columns, schema=REJECTED_SCHEMA)
    report = {"rows_in": 30, "rejected": 30}
    report["rejected_by_reason"] = dict.fromkeys(reasons, 1)
    lines = too_many_text(report, rejected, 0.01).splitlines()
    assert lines[20:22] == [
        """  1 x reason 19: rows 19 (counted from 0), the first is "it's\"""",
        "  10 x other reasons (10)",
    ]


NUMBERS = ["0", "1,250.50", "-3", "+4", "12%", "2024-05-01", "10:30", "01-0000"]
NUMBER = "its first texts are numbers, such as '0': is that the right column?"


def numbers_of(text="text", last="7"):
    texts = [*NUMBERS, *map(str, range(1, 200)), last]
    labels = {"label": [f"l{i % 2}" for i in range(len(texts))]}
    return pd.DataFrame({text: texts, **labels})


@pytest.mark.parametrize("name", ["phone", "text"])
def test_numbers_in_place_of_texts_are_warned_of_once(name, caplog):
    chosen = Columns(name, None, "label", None)
    parts, report, _ = split(numbers_of(name), chosen, text_column=name)
    assert sum(map(len, parts.values())) + report["duplicates"] == 208
    (line,) = [m for m in caplog.messages if "are numbers" in m]
    assert line == f"split.text_column is {name!r}, and {NUMBER}"


@pytest.mark.parametrize("text", ["five", "5 stars", "v1.2", "\u4e94"])
def test_one_text_that_is_no_number_is_enough(text, caplog):
    split(numbers_of(last=text))
    assert not [m for m in caplog.messages if "are numbers" in m]


def test_unlabelled_text():
    parts, report, _ = split(frame_of(300)[["text"]], Columns("text", None, None, None))
    assert parts["train_rows"].column_names == ["text", "source_row"]
    assert "labels" not in report


def test_a_key_changes_with_data_and_options_and_only_then():
    def key(data, **options):
        return text_recipes(data, **options)["train_rows"].key

    frame = frame_of(300)
    assert key(frame).digest == key(frame.copy()).digest
    assert key(frame).digest == key(pa.Table.from_pandas(frame)).digest
    other = frame.assign(text=frame["text"].replace("text number 7 of many", "else"))
    (change,) = key(other).changes_since(key(frame))
    assert change == "raw_texts: changed"
    assert key(frame, seed=3).changes_since(key(frame)) == ["seed: 0 -> 3"]


def test_one_huge_text():
    frame = frame_of(300)
    frame.loc[7, "text"] = "word " * 2_000_000
    parts, report, _ = split(frame)
    assert report["rejected"] == 0
    assert max(max(map(len, rows["text"])) for rows in parts.values()) == 10_000_000


def test_batches_are_bounded_in_bytes_and_lose_nothing(monkeypatch):
    monkeypatch.setattr(raw_texts, "BATCH_BYTES", 500)
    frame = frame_of(200)
    frame.loc[3, "text"] = None
    raw = open_raw_texts(pa.Table.from_pandas(frame))
    batches = list(raw.batches(["text", "label"]))
    assert max(len(batch.rows) for batch in batches) < 20
    rows = [row for batch in batches for row in batch.rows.tolist()]
    texts = [t for batch in batches for t in batch.columns["text"].to_pylist()]
    assert rows == list(range(200))
    assert texts[:3] == frame["text"].tolist()[:3] and texts[3] is None
    assert split(frame)[1]["rows_in"] == 200


def test_rows_of_shards_are_named_with_their_file(tmp_path):
    for name in "ab":
        frame = frame_of(100)
        frame["text"] = name + frame["text"]
        frame.loc[7:8, "text"] = None
        frame.to_parquet(tmp_path / f"{name}.parquet")
    places = r"rows a\.parquet:7, a\.parquet:8, b\.parquet:7"
    with pytest.raises(SplitError, match=places):
        text_recipes(TextFiles(tmp_path))["train_rows"].to_dataset()


def test_a_report_as_flat_figures():
    report = {
        "rows_in": 10,
        "rows_out": {"train": 5, "validation": 1, "test": 1},
        "rejected": 3,
        "duplicates": 0,
        "near_duplicates": 0,
        "rejected_by_reason": {
            "label has no row in the train split": 2,
            "text is int64, not text": 1,
        },
    }
    metrics = split_metrics(report)
    assert metrics["split_rows_train"] == 5.0
    assert metrics["split_rejected/label has no row in the train split"] == 2.0
    assert metrics["split_rejected/text is int64 not text"] == 1.0
