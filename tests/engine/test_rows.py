"""Which rows are used, and what is said of the others."""

from __future__ import annotations

import datetime
import decimal
from dataclasses import replace

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flatout.engine.data.columns import Columns
from flatout.engine.data.raw_texts import RawTextsError, open_raw_texts
from flatout.engine.data.readers.text_files import TextFiles
from flatout.engine.data.row_hashes import one_form
from flatout.engine.data.rows import check_batch
from flatout.engine.data.split import SplitError
from flatout.engine.data.split_recipes import plan_split
from flatout.engine.parameters import SplitSettings

CLASSES = Columns("text", None, "label", None)


def checked(data, columns=CLASSES):
    """Rows that pass, and {row: reason} of those that do not."""
    raw = open_raw_texts(data)
    batches = [check_batch(b, columns) for b in raw.batches(columns.names)]
    rows = [row for b in batches for row in b.table.to_pylist()]
    rejected = [row for b in batches for row in b.rejected.to_pylist()]
    return rows, {row["row"]: row["reason"] for row in rejected}


def test_good_rows_keep_text_label_and_their_number():
    rows, rejected = checked(pd.DataFrame({"text": ["a b", "c"], "label": ["x", "y"]}))
    assert rows == [
        {"text": "a b", "label": "x", "source_row": 0},
        {"text": "c", "label": "y", "source_row": 1},
    ]
    assert rejected == {}


def test_texts_that_are_null_empty_or_no_text_are_named_by_row():
    texts = [
        "good",
        None,
        "",
        " \t\n",
        7,
        "a\x00b",
        "bad \ud800",
        ["list"],
        float("nan"),
    ]
    frame = pd.DataFrame({"text": pd.Series(texts, dtype=object), "label": "x"})
    rows, rejected = checked(frame)
    assert [row["source_row"] for row in rows] == [0]
    assert rejected == {
        1: "text is missing",
        2: "text is empty",
        3: "text is empty",
        4: "text is a number, not text",
        5: "text holds a NUL byte (UTF-16 or binary data?)",
        6: "text is not valid Unicode",
        7: "text is not text",
        8: "text is missing",
    }


def test_words_for_missing_are_words():
    rows, rejected = checked(
        pd.DataFrame({"text": ["NA", "null", "nan"], "label": "x"})
    )
    assert [row["text"] for row in rows] == ["NA", "null", "nan"]
    assert rejected == {}


def test_a_column_of_numbers_is_no_text():
    _, rejected = checked(pd.DataFrame({"text": [1, 2], "label": ["x", "y"]}))
    assert rejected == dict.fromkeys((0, 1), "text is int64, not text")


def test_bytes_that_are_not_utf8_cost_their_row_only():
    rows, rejected = checked(pa.table({"text": invalid_utf8(), "label": ["x", "y"]}))
    assert [row["text"] for row in rows] == ["ok"]
    assert rejected == {1: "text is not valid UTF-8"}


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["b", "a"], ["b", "a"]),
        ([3, 1], ["3", "1"]),
        ([1.0, 2.0], ["1", "2"]),
        ([1.0, 2.5], ["1", "2.5"]),
        (np.array([1, 2.5], np.float16), ["1", "2.5"]),
        (pd.Series([1.0, "b"], dtype=object), ["1", "b"]),
        (pd.Series([True, "b"], dtype=object), ["true", "b"]),
        ([True, False], ["true", "false"]),
    ],
)
def test_labels_of_several_kinds_become_names(values, names):
    rows, _ = checked(pd.DataFrame({"text": ["t", "u"], "label": values}))
    assert [row["label"] for row in rows] == names


NAN = pa.array([0.5, float("nan")])


@pytest.mark.parametrize("nan", [NAN, NAN.cast(pa.float16()), NAN.dictionary_encode()])
@pytest.mark.parametrize("column", ["text", "label", "who", "part", "flag"])
def test_nan_is_a_missing_value_in_whatever_column(column, nan):
    """As pandas has it, which knows no other missing float."""
    flags = ("flag",) if column == "flag" else ()
    columns = Columns(
        "text", None, None if flags else "label", "who", flags=flags, split="part"
    )
    if flags:
        columns = replace(columns, label_type=pa.list_(pa.string()))
    good = {"text": ["a", "b"], "label": ["x", "y"], "who": ["p", "q"]}
    good |= {"part": ["train", "train"], "flag": [0, 1]}
    _, rejected = checked(pa.table({**good, column: nan}), columns)
    assert rejected[1] == f"{column} is missing"


def invalid_utf8():
    """`ok`, and two bytes that are no UTF-8."""
    offsets = pa.py_buffer(np.array([0, 2, 4], np.int32))
    buffers = [None, offsets, pa.py_buffer(b"ok\xff\xfe")]
    return pa.Array.from_buffers(pa.string(), 2, buffers)


def test_labels_and_groups_that_are_not_utf8_cost_their_row():
    table = pa.table({"text": ["a", "b"], "label": invalid_utf8()})
    rows, rejected = checked(table)
    assert [row["label"] for row in rows] == ["ok"]
    assert rejected == {1: "label is not valid UTF-8"}
    table = pa.table({"text": ["a", "b"], "label": ["x", "y"], "who": invalid_utf8()})
    _, rejected = checked(table, Columns("text", None, "label", "who"))
    assert rejected == {1: "who is not valid UTF-8"}


def test_class_numbers_below_zero_are_missing_labels():
    kinds = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["n", "p"]),
        }
    )
    data = datasets.Dataset.from_dict({"text": list("abc"), "label": [1, -1, 0]}, kinds)
    rows, rejected = checked(data)
    assert [row["label"] for row in rows] == ["p", "n"]
    assert rejected == {1: "label is missing"}


def test_labels_that_are_missing_or_no_labels():
    labels = pd.Series([None, " ", ["x"], "x"], dtype=object)
    rows, rejected = checked(pd.DataFrame({"text": list("abcd"), "label": labels}))
    assert [row["source_row"] for row in rows] == [3]
    assert rejected == {
        0: "label is missing",
        1: "label is empty",
        2: "label is neither text nor a number",
    }


def test_targets_of_a_regression_are_finite_numbers():
    columns = Columns("text", None, "label", None, label_type=pa.float64())
    labels = ["0.5", "x", None, "inf", "2"]
    rows, rejected = checked(
        pd.DataFrame({"text": list("abcde"), "label": labels}), columns
    )
    assert [row["label"] for row in rows] == [0.5, 2.0]
    assert rejected == {
        1: "label is not a finite number, as model.task wants",
        2: "label is missing",
        3: "label is not a finite number, as model.task wants",
    }


def test_pairs_and_groups_must_be_there():
    columns = Columns("text", "other", "label", "who")
    frame = pd.DataFrame(
        {"text": ["a", "b", "c"], "other": ["d", None, "f"], "label": "x"}
        | {"who": ["p", "q", None]}
    )
    rows, rejected = checked(frame, columns)
    assert rows == [{"text": "a", "text_pair": "d", "label": "x", "source_row": 0}]
    assert rejected == {1: "other is missing", 2: "who is missing"}


@pytest.mark.parametrize(
    ("regression", "label", "reason", "shown"),
    [
        (True, "3;5", "not a finite number, as model.task wants", "3;5"),
        (True, "1_0", "not a finite number, as model.task wants", "1_0"),
        (True, ["x"], "not a finite number, as model.task wants", '["x"]'),
        (True, None, "missing", "text b"),
        (False, ["x"], "neither text nor a number", '["x"]'),
        (False, "\ud800!", "not valid Unicode", "?!"),
        (False, None, "missing", "text b"),
        (False, " ", "empty", "text b"),
    ],
)
def test_an_excerpt_shows_what_is_wrong(regression, label, reason, shown):
    labels = pd.Series(["1", label], dtype=object)
    frame = pd.DataFrame({"text": ["text a", "text b"], "label": labels})
    columns = Columns(
        "text", None, "label", None, pa.float64() if regression else pa.string()
    )
    (batch,) = open_raw_texts(frame).batches(columns.names)
    (row,) = check_batch(batch, columns).rejected.to_pylist()
    assert (row["reason"], row["excerpt"]) == (f"label is {reason}", shown)


def test_groups_that_have_no_name():
    columns = Columns("text", None, "label", "who")
    who = pd.Series([["a"], "b\ud800", "c", 4], dtype=object)
    frame = pd.DataFrame({"text": list("abcd"), "label": "x", "who": who})
    rows, rejected = checked(frame, columns)
    assert [row["source_row"] for row in rows] == [2, 3]
    assert rejected == {
        0: "who is neither text nor a number",
        1: "who is not valid Unicode",
    }


def test_empty_and_blank_groups_are_no_group():
    columns = Columns("text", None, "label", "who")
    frame = pd.DataFrame({"text": list("abc"), "label": "x", "who": ["p", "", " \t"]})
    rows, rejected = checked(frame, columns)
    assert [row["source_row"] for row in rows] == [0]
    assert rejected == {1: "who is empty", 2: "who is empty"}
    for numbers in ([1, 2, 3], [0.5, 1.0, 2.0], [True, False, True]):
        assert checked(frame.assign(who=numbers), columns)[1] == {}


def test_excerpts_are_short_and_printable():
    frame = pd.DataFrame({"text": ["x" * 500 + "\x00", "ok"], "label": "a"})
    raw = open_raw_texts(frame)
    (batch,) = raw.batches(["text", "label"])
    (row,) = check_batch(batch, CLASSES).rejected.to_pylist()
    assert row["excerpt"] == "x" * 80
    assert (row["source"], row["row"]) == ("raw_texts", 0)


def test_missing_and_double_columns_are_named_with_what_there_is():
    columns = Columns("txt", None, "label", None)
    raw = open_raw_texts(
        pa.table([["a"], ["x"], ["y"]], names=["text", "label", "label"])
    )
    with pytest.raises(RawTextsError) as error:
        columns.check_present(raw)
    assert str(error.value) == (
        "raw_texts has the columns 'text', 'label', 'label'. split.text_column is "
        "'txt', which is not there (did you mean 'text'?). split.label_column is "
        "'label', which is there twice. Set the names in conf/local/parameters.yml"
    )


@pytest.mark.parametrize(
    ("present", "hint"),
    [
        (["text", " label"], " (did you mean ' label'?)"),
        (["text", "LABEL"], " (did you mean 'LABEL'?)"),
        (["text", "x"], ""),
    ],
)
def test_the_nearest_name_of_a_missing_column(present, hint):
    raw = open_raw_texts(pa.table([["a"], ["x"]], names=present))
    with pytest.raises(RawTextsError) as error:
        CLASSES.check_present(raw)
    assert f"split.label_column is 'label', which is not there{hint}. Set" in str(
        error.value
    )


def test_tasks_with_labels_need_a_label_column():
    settings = SplitSettings(label_column=None)
    with pytest.raises(RawTextsError, match=r"needs labels: set split\.label_column"):
        Columns.of(settings, pa.string(), "sequence-classification")
    assert Columns.of(settings, None, "causal-lm").names == ["text"]


def test_language_models_ignore_labels():
    assert Columns.of(SplitSettings(), None, "masked-lm").label is None


def test_near_duplicates_differ_in_case_space_and_composition_alone():
    """Also if a letter in capitals is two."""
    forms = {one_form(text) for text in ("Stra\xdfe  caf\xe9", " STRASSE\tCafe\u0301")}
    assert len(forms) == 1
    assert one_form("a b") != one_form("ab")


DAYS = [datetime.date(2026, 1, n) for n in (1, 2)]
TIMES = [datetime.datetime(2026, 1, n, 12) for n in (1, 2)]
ODD_TYPES = {
    "date": pa.array(DAYS),
    "timestamp": pa.array(TIMES),
    "duration": pa.array([datetime.timedelta(n) for n in (1, 2)]),
    "time": pa.array([datetime.time(n) for n in (1, 2)]),
    "struct": pa.array([{"a": 1, "b": "x"}, {"a": 2, "b": None}]),
    "list": pa.array([["x"], ["y", "z"]]),
    "list of structs": pa.array([[{"a": 1}], []]),
    "map": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64())),
    "decimal": pa.array([decimal.Decimal("1.5"), decimal.Decimal("2.5")]),
    "view": pa.array(["train", "test"], pa.string_view()),
    "bytes": pa.array([b"train", b"\xff\xfe"]),
    "few bytes": pa.array([b"ab", b"\xff\xfe"], pa.binary(2)),
    "null": pa.nulls(2),
    "bool": pa.array([True, False]),
    "half": pa.array(np.array([1, 2.5], np.float16)),
}
NUMBERS = replace(CLASSES, label_type=pa.float64())
LISTS = replace(CLASSES, label_type=pa.list_(pa.string()))


@pytest.mark.parametrize("name", list(ODD_TYPES))
@pytest.mark.parametrize("column", ["text", "label", "who", "part"])
def test_a_column_of_whatever_type_is_read_or_rejected(tmp_path, column, name):
    """From a table as from a Parquet file of it, of one digest each time."""
    good = {"text": ["a", "b"], "label": ["x", "y"], "who": ["p", "q"]}
    table = pa.table({**good, "part": ["train", "test"], column: ODD_TYPES[name]})
    kinds = [CLASSES, NUMBERS, LISTS] if column == "label" else [CLASSES]
    for one in kinds:
        columns = replace(one, group="who", split="part")
        rows, rejected = checked(table, columns)
        assert {row["source_row"] for row in rows} | rejected.keys() == {0, 1}
    raw = open_raw_texts(table)
    assert raw.digest(columns.names) == raw.digest(columns.names)
    other = open_raw_texts(table.take([1, 0]) if name != "view" else table)
    same = name in ("null", "view")
    assert (raw.digest([column]) == other.digest([column])) == same
    if name in ("view", "half"):
        return
    pq.write_table(table, tmp_path / "a.parquet")
    same = checked(TextFiles(tmp_path / "a.parquet"), columns)[1]
    assert same.keys() == rejected.keys()


NAMES = datasets.ClassLabel(names=["n", "p"])


@pytest.mark.parametrize(
    ("kind", "given", "found"),
    [
        (datasets.List(NAMES), [[0, 1], [], None, [1, -1]], [["n", "p"], []]),
        (datasets.List(datasets.Value("int64")), [[0, 12], None], [["0", "12"]]),
        (datasets.Value("string"), ["[0, 12]", "[0.5]"], [["0", "12"]]),
        (NAMES, [1, -1], None),
    ],
)
def test_lists_of_class_numbers_are_lists_of_names(kind, given, found):
    texts = [f"t{n}" for n in range(len(given))]
    features = datasets.Features({"text": datasets.Value("string"), "label": kind})
    data = datasets.Dataset.from_dict({"text": texts, "label": given}, features)
    rows, _ = checked(data, LISTS if found else CLASSES)
    assert [row["label"] for row in rows] == (found or ["p"])


def test_intervals_of_pandas_are_named_as_it_shows_them():
    numbers = pd.Series([1.0, 9.0, None])
    frame = pd.DataFrame({"text": list("abc"), "label": pd.cut(numbers, [0, 5, 10])})
    rows, rejected = checked(frame)
    assert [row["label"] for row in rows] == ["(0, 5]", "(5, 10]"]
    assert rejected == {2: "label is missing"}


def test_frames_of_other_makes_and_without_a_header():
    class DataFrame:
        def to_arrow(self):
            return pa.table({"text": ["a"], "label": ["x"]})

    assert checked(DataFrame())[0][0]["label"] == "x"
    plain = pd.DataFrame([["a", "x"], ["b", "y"]])
    rows, _ = checked(plain, Columns("0", None, "1", None))
    assert [row["label"] for row in rows] == ["x", "y"]


@pytest.mark.parametrize("text", ["\u200b\u200d", "\ufeff", " \u2060\xa0", "\u3000"])
def test_a_text_that_nobody_can_see_is_empty(text):
    frame = pd.DataFrame({"text": [text, "a\u200b"], "label": "x"})
    assert checked(frame)[1] == {0: "text is empty"}


def test_flags_may_be_words():
    frame = pd.DataFrame({"text": ["a", "b"], "p": ["True", "FALSE"], "q": ["1", "x"]})
    columns = Columns("text", None, None, None, pa.list_(pa.string()), ("p", "q"))
    rows, rejected = checked(frame, columns)
    assert rows[0]["label"] == ["p", "q"]
    assert rejected == {1: "q is neither 0 nor 1"}


def test_what_a_column_in_a_folders_name_and_a_saved_data_set_say(tmp_path):
    folder = tmp_path / "hive" / "label=good"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"text": ["a"]}), folder / "a.parquet")
    with pytest.raises(RawTextsError, match=r"\(label=good\) are not read: add"):
        CLASSES.check_present(TextFiles(tmp_path / "hive"))
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "saved")
    with pytest.raises(RawTextsError, match=r"of type flatout\.datasets\.KeyedArrow"):
        _ = TextFiles(tmp_path / "saved").files


def test_classes_that_are_numbers_are_asked_about():
    labels = np.random.default_rng(0).normal(size=300)
    frame = pd.DataFrame({"text": [f"t{n}" for n in range(300)], "label": labels})
    plan = plan_split(open_raw_texts(frame), CLASSES, SplitSettings())
    with pytest.raises(SplitError, match=r"are 300 numbers: model\.task: regression"):
        plan["train_rows"].to_dataset()
