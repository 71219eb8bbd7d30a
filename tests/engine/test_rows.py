"""Which rows are used, and why others are rejected."""

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
from flatout.engine.data.row_facts import normalised_text
from flatout.engine.data.rows import check_batch
from flatout.engine.data.split import SplitError
from tests.make import text_recipes

CLASSES = Columns("text", None, "label", None)


def checked(data, columns=CLASSES):
    """Return the valid rows, and {row: reason} for the rejected ones."""
    raw = open_raw_texts(data)
    batches = [check_batch(b, columns) for b in raw.batches(columns.names)]
    rows = [row for b in batches for row in b.table.to_pylist()]
    rejected = [row for b in batches for row in b.rejected.to_pylist()]
    return rows, {row["row"]: row["reason"] for row in rejected}


def invalid_utf8():
    """Return `ok`, and two bytes that are not valid UTF-8."""
    offsets = pa.py_buffer(np.array([0, 2, 4], np.int32))
    buffers = [None, offsets, pa.py_buffer(b"ok\xff\xfe")]
    return pa.Array.from_buffers(pa.string(), 2, buffers)


GROUPS = Columns("text", None, "label", "who")
NUMBERS = replace(CLASSES, label_type=pa.float64())
LISTS = replace(CLASSES, label_type=pa.list_(pa.string()))
FLAGS = replace(LISTS, label=None, flags=("p", "q"))
NAN = float("nan")
NUL = "text contains a NUL byte (UTF-16 or binary data?)"
UNFIT = "label is not a finite number, as model.task wants"
REJECTED = [
    (
        CLASSES,
        {"text": ["NA", "null", "nan", "a\u200b"], "label": ["x", 1, 2.5, True]},
        {},
    ),
    (
        CLASSES,
        {"text": ["good", None, "", " \t\n", 7, "a\x00b", "b \ud800", ["list"], NAN]},
        dict(
            enumerate(
                [
                    "text is missing",
                    "text is empty",
                    "text is empty",
                    "text is a number, not text",
                    NUL,
                    "text is not valid Unicode",
                    "text is not text",
                    "text is missing",
                ],
                start=1,
            )
        ),
    ),
    (
        CLASSES,
        {"text": ["\u200b\u200d", "\ufeff", " \u2060\xa0", "\u3000", "a"]},
        dict.fromkeys(range(4), "text is empty"),
    ),
    (
        CLASSES,
        {"text": pa.array([1, 2])},
        dict.fromkeys((0, 1), "text is int64, not text"),
    ),
    (CLASSES, {"text": invalid_utf8()}, {1: "text is not valid UTF-8"}),
    (CLASSES, {"label": invalid_utf8()}, {1: "label is not valid UTF-8"}),
    (GROUPS, {"who": invalid_utf8()}, {1: "who is not valid UTF-8"}),
    (
        CLASSES,
        {"label": [None, " ", ["x"], "x"]},
        {
            0: "label is missing",
            1: "label is empty",
            2: "label is neither text nor a number",
        },
    ),
    (
        NUMBERS,
        {"label": ["0.5", "x", None, "inf", "2"]},
        {1: UNFIT, 2: "label is missing", 3: UNFIT},
    ),
    (
        Columns("text", "other", "label", "who"),
        {"other": ["d", None, "f"], "who": ["p", "q", None]},
        {1: "other is missing", 2: "who is missing"},
    ),
    (
        GROUPS,
        {"who": [["a"], "b\ud800", "c", 4, "", " \t"]},
        {
            0: "who is neither text nor a number",
            1: "who is not valid Unicode",
            4: "who is empty",
            5: "who is empty",
        },
    ),
    *(
        (GROUPS, {"who": pa.array(who)}, {})
        for who in ([1, 2], [0.5, 1.0], [True, False])
    ),
    (FLAGS, {"p": ["True", "FALSE"], "q": ["1", "x"]}, {1: "q is neither 0 nor 1"}),
]


@pytest.mark.parametrize(("columns", "given", "reasons"), REJECTED)
def test_values_of_no_use_are_named_by_row(columns, given, reasons):
    count = max(map(len, given.values()))
    good = {"text": [f"t{n}" for n in range(count)], "label": ["x"] * count}
    values = {**good, "who": ["p"] * count, **given}
    if any(isinstance(column, pa.Array) for column in given.values()):
        data = pa.table(values)
    else:
        columns_of = {n: pd.Series(list(v), dtype=object) for n, v in values.items()}
        data = pd.DataFrame(columns_of)
    rows, rejected = checked(data, columns)
    assert rejected == reasons
    assert [r["source_row"] for r in rows] == [
        n for n in range(count) if n not in reasons
    ]


def test_good_rows_keep_what_they_are_made_of():
    frame = pd.DataFrame(
        {"text": ["a b"], "label": ["x"], "other": ["d"], "n": ["0.5"]}
    )
    row = {"text": "a b", "label": "x", "source_row": 0}
    assert checked(frame) == ([row], {})
    pairs = Columns("text", "other", "label", None)
    assert checked(frame, pairs) == ([{**row, "text_pair": "d"}], {})
    assert checked(frame, replace(NUMBERS, label="n"))[0] == [{**row, "label": 0.5}]
    flags = pd.DataFrame({"text": ["a b"], "p": ["True"], "q": ["1"]})
    assert checked(flags, FLAGS)[0] == [{**row, "label": ["p", "q"]}]


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


NANS = pa.array([0.5, NAN])


@pytest.mark.parametrize(
    "nan", [NANS, NANS.cast(pa.float16()), NANS.dictionary_encode()]
)
@pytest.mark.parametrize("column", ["text", "label", "who", "part", "flag"])
def test_nan_is_a_missing_value_in_whatever_column(column, nan):
    """pandas has no other way to express a missing float."""
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


@pytest.mark.parametrize(
    ("regression", "label", "reason", "shown"),
    [
        (True, "3;5", "not a finite number, as model.task wants", "3;5"),
        (True, "1_0", "not a finite number, as model.task wants", "1_0"),
        (True, -1e39, "too large for float32", "-1e+39"),
        (True, ["x"], "not a finite number, as model.task wants", '["x"]'),
        (True, None, "missing", "text b"),
        (False, ["x"], "neither text nor a number", '["x"]'),
        (False, "\ud800!", "not valid Unicode", "?!"),
        (False, None, "missing", "text b"),
        (False, " ", "empty", "text b"),
        (False, "x" * 500 + "\ud800", "not valid Unicode", "x" * 80),
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


def test_near_duplicates_differ_in_case_space_and_composition_alone():
    """This is also true for a letter whose upper case consists of two letters."""
    forms = {
        normalised_text(text) for text in ("Stra\xdfe  caf\xe9", " STRASSE\tCafe\u0301")
    }
    assert len(forms) == 1
    assert normalised_text("a b") != normalised_text("ab")


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


def test_what_a_column_in_a_folders_name_and_a_saved_data_set_say(tmp_path):
    folder = tmp_path / "hive" / "label=good"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"text": ["a"]}), folder / "a.parquet")
    with pytest.raises(RawTextsError, match=r"\(label=good\) are not read: add"):
        CLASSES.check_present(TextFiles(tmp_path / "hive"))
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "saved")
    with pytest.raises(RawTextsError, match=r"of type huggingface\.ArrowDataset"):
        _ = TextFiles(tmp_path / "saved").files


def test_classes_that_are_numbers_are_asked_about():
    labels = np.random.default_rng(0).normal(size=300)
    frame = pd.DataFrame({"text": [f"t{n}" for n in range(300)], "label": labels})
    with pytest.raises(SplitError, match=r"are 300 numbers: model\.task: regression"):
        text_recipes(frame)["train_rows"].to_dataset()
