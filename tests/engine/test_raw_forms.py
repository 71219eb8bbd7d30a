"""Rows from any source and of any Arrow type are read back unchanged or reported."""

import datetime
import decimal
import re
import struct
from dataclasses import replace

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from flatout.engine.data.raw_texts import RawTextsError, open_raw_texts
from flatout.engine.data.readers.text_files import TextFiles
from tests.engine.test_rows import CLASSES, LISTS, NUMBERS, checked

DAY, SPAN = datetime.datetime(2026, 1, 2, 3), datetime.timedelta(3)
PLAIN = {
    2: [pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.float64()],
    decimal.Decimal("1.5"): [pa.decimal32(5, 2), pa.decimal128(9, 2)],
    DAY.date(): [pa.date32(), pa.date64()],
    DAY: [pa.timestamp("s"), pa.timestamp("ns", "UTC")],
    DAY.time(): [pa.time32("s"), pa.time64("us")],
    SPAN: [pa.duration("ms"), pa.duration("ns")],
    (1, 2, 3): [pa.month_day_nano_interval()],
    b"ab": [pa.binary(), pa.binary(2), pa.large_binary(), pa.binary_view()],
    "x": [pa.string(), pa.large_string(), pa.string_view(), pa.null()],
}
OTHERS = [
    (True, pa.bool_()),
    ([1, 2], pa.list_(pa.int64(), 2)),
    (["a", "b"], pa.list_(pa.string())),
    ([1], pa.large_list(pa.int64())),
    ([1], pa.list_view(pa.int64())),
    ({"a": 1}, pa.struct([("a", pa.int64())])),
    ([{"a": 1}], pa.list_(pa.struct([("a", pa.int64())]))),
    ([("a", 1)], pa.map_(pa.string(), pa.int64())),
]
TYPED = [(value, kind) for value, kinds in PLAIN.items() for kind in kinds] + OTHERS
ODD = {
    "runs": pa.RunEndEncodedArray.from_arrays([2, 3], pa.array(["x", "y"])),
    "dictionary": pa.array(["x", None, "x"]).dictionary_encode(),
    "numbered": pa.array([7, None, 7]).dictionary_encode(),
    "union": pa.UnionArray.from_sparse(
        pa.array([0, 1, 0], pa.int8()), [pa.array(["x"] * 3), pa.array([1, 2, 3])]
    ),
    "uuid": pa.array([bytes(range(16)), None, bytes(16)], pa.uuid()),
    "no text": pa.array([b"train", None, b"\xff\xfe"]),
}


def column_of(value, kind):
    """Return three rows, one of them without a value."""
    value = None if pa.types.is_null(kind) else value
    return pa.array([value, None, value], kind)


COLUMNS = ODD | {str(kind): column_of(value, kind) for value, kind in TYPED}


def written(folder, table, form, **options):
    """Write `table` to a file. Return None if pyarrow cannot write or read its type."""
    path = folder / f"a.{form}"
    write = {"parquet": pq.write_table, "feather": pyarrow.feather.write_feather}
    try:
        write[form](table, path, **options)
        _ = form == "parquet" and pq.read_table(path)
    except (pa.ArrowException, NotImplementedError):
        return None
    return path


def sources(folder, table):
    """Return `table` in all forms that can represent it."""
    yield "table", open_raw_texts(table)
    for form in ("parquet", "feather"):
        if path := written(folder, table, form):
            yield form, TextFiles(path)
    for name, make in (
        ("dataset", datasets.Dataset),
        ("pandas", pa.Table.to_pandas),
        ("pandas of arrow", lambda t: t.to_pandas(types_mapper=pd.ArrowDtype)),
    ):
        try:
            made = make(table)
        except (pa.ArrowException, NotImplementedError, TypeError, ValueError):
            continue
        yield name, open_raw_texts(made)


@pytest.mark.parametrize("name", list(COLUMNS))
def test_a_column_of_any_type_is_read_or_rejected_from_any_source(tmp_path, name):
    good = {"text": ["a", "b", "c"], "label": ["x", "y", "x"], "who": ["p", "q", "r"]}
    good |= {"part": ["train", "test", "train"]}
    for column in good:
        table, found = pa.table({**good, column: COLUMNS[name]}), {}
        kinds = [CLASSES, NUMBERS, LISTS] if column == "label" else [CLASSES]
        for source, raw in sources(tmp_path, table):
            assert raw.digest(list(good)) == raw.digest(list(good))
            for place, kind in enumerate(kinds):
                columns = replace(kind, group="who", split="part")
                rows, rejected = checked(raw, columns)
                assert {r["source_row"] for r in rows} | rejected.keys() == {0, 1, 2}
                found[source, place] = rows
        for (source, place), rows in found.items():
            if source in ("parquet", "feather", "dataset"):
                assert rows == found["table", place], (source, column)


@pytest.mark.parametrize("name", list(COLUMNS))
def test_the_order_of_values_of_any_type_changes_the_digest(name):
    table = pa.table({"text": COLUMNS[name]})
    turned = pa.concat_tables([table.slice(1), table.slice(0, 1)])
    first, second = (open_raw_texts(one).digest(["text"]) for one in (table, turned))
    assert (first == second) is (name == "null")


COLUMN_NAMES = ["text", "label"]
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ROWS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=8)


def frames_of(table):
    yield open_raw_texts(table)
    yield open_raw_texts(table.to_pandas())
    yield open_raw_texts(datasets.Dataset(table))
    try:
        import polars
    except ImportError:
        return
    yield open_raw_texts(polars.from_arrow(table))


@given(
    rows=ROWS,
    form=st.sampled_from(["parquet", "feather"]),
    compression=st.sampled_from(["zstd", "lz4", None]),
    damage=st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=4),
)
@settings(max_examples=25)
def test_rows_come_back_from_frames_and_columnar_files_and_damage_is_told(
    tmp_path_factory, rows, form, compression, damage
):
    """Corrupted bytes lead to rows, or to a RawTextsError with the file's name."""
    folder = tmp_path_factory.getbasetemp()
    table = pa.table(dict(zip(COLUMN_NAMES, zip(*rows, strict=True), strict=True)))
    options = {"compression": compression or {"feather": "uncompressed"}.get(form)}
    path = written(folder, table, form, **options)
    for raw in (*frames_of(table), TextFiles(path)):
        batches = list(raw.batches(COLUMN_NAMES))
        columns = [[b.columns[n].to_pylist() for n in COLUMN_NAMES] for b in batches]
        assert [r for both in columns for r in zip(*both, strict=True)] == rows
    content = bytearray(path.read_bytes())
    for place, byte in damage:
        content[place % len(content)] = byte
    path.write_bytes(content)
    try:
        files = TextFiles(path)
        if {*COLUMN_NAMES} <= {*files.column_names}:
            checked(files, CLASSES)
    except RawTextsError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize("offset", [-5, 1 << 30])
@pytest.mark.parametrize("nested", [False, True])
def test_an_offset_outside_of_an_arrow_file_names_the_file(tmp_path, offset, nested):
    texts = pa.array(["one", "of", "three"])
    labels = pa.ListArray.from_arrays([0, 1, 2, 3], texts) if nested else texts
    path = written(
        tmp_path, pa.table({"label": labels}), "feather", compression="uncompressed"
    )
    content = path.read_bytes()
    sound, damaged = (struct.pack("<4i", 0, 3, n, 10) for n in (5, offset))
    assert content.count(sound) == 1
    path.write_bytes(content.replace(sound, damaged))
    with pytest.raises(RawTextsError, match=re.escape(str(path))):
        list(TextFiles(path).batches(["label"]))
    path.write_bytes(content.replace(b"label", b"la\x80el"))
    with pytest.raises(RawTextsError, match=re.escape(str(path))):
        _ = TextFiles(path).column_names
