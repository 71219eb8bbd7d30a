"""Files of every kind, and everything that is wrong with files."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import os
from contextlib import contextmanager

import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.engine.data.columns import Columns
from flatout.engine.data.raw_texts import RawTextsError
from flatout.engine.data.readers.file_reader import Format
from flatout.engine.data.readers.text_files import TextFiles
from flatout.engine.data.row_hashes import group_hashes
from flatout.engine.data.rows import check_batch
from flatout.engine.data.split import SplitError
from flatout.engine.data.split_recipes import plan_split
from flatout.engine.parameters import SplitSettings

COLUMNS = ["text", "label"]
CLASSES = Columns("text", None, "label", None)
TEXTS = Columns("text", None, None, None)
GOOD = {
    "text": ["one NA", "null", 'two\nlines, "quoted"'],
    "label": ["007", "nan", "x"],
}


def rows_of(files):
    """[(source, row, text, label)] and [(row, reason, excerpt)] of all batches."""
    rows, broken = [], []
    for batch in files.batches(COLUMNS):
        values = [batch.columns[name].to_pylist() for name in COLUMNS]
        rows += list(
            zip(
                [batch.source] * len(batch.rows),
                batch.rows.tolist(),
                *values,
                strict=True,
            )
        )
        broken += [(b.row, b.reason, b.excerpt) for b in batch.broken]
    return rows, broken


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


CSV = 'text,label\none NA,007\nnull,nan\n"two\nlines, ""quoted""",x\n'


def write_all_kinds(folder):
    """The same three rows as each kind of file."""
    table = pa.table(GOOD)
    pq.write_table(table, folder / "a.parquet")
    pyarrow.feather.write_feather(table, folder / "a.feather")
    with pa.ipc.new_stream(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    lines = [json.dumps(row) for row in table.to_pylist()]
    write(folder / "a.jsonl", "\n".join(lines) + "\n")
    write(folder / "a.csv", CSV)
    write(folder / "a.tsv", CSV.replace(",", "\t").replace("lines\t", "lines,"))
    write(folder / "a.csv.gz", gzip.compress(CSV.encode(), mtime=0))


@pytest.mark.parametrize(
    "suffix", ["parquet", "feather", "arrow", "jsonl", "csv", "tsv", "csv.gz"]
)
def test_each_kind_of_file_gives_the_same_rows(tmp_path, suffix):
    write_all_kinds(tmp_path)
    files = TextFiles(tmp_path / f"a.{suffix}")
    rows, broken = rows_of(files)
    texts = zip(GOOD["text"], GOOD["label"], strict=True)
    assert rows == [(f"a.{suffix}", i, *pair) for i, pair in enumerate(texts)]
    assert broken == []
    assert files.column_names == COLUMNS


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_an_empty_line_of_a_file_of_one_column_is_a_row(tmp_path, encoding, end):
    lines = ["text", "a", "", "b,c", '"d', "", 'd"', "", "e"]
    content = (end.join(lines) + end).encode(encoding)
    path = write(tmp_path / "a.csv", content)
    (batch,) = TextFiles(path, Format(encoding=encoding)).batches(["text"])
    assert batch.columns["text"].to_pylist() == ["a", "", f"d{end}{end}d", "", "e"]
    assert batch.rows.tolist() == [0, 1, 3, 4, 5]
    assert [(b.row, b.excerpt) for b in batch.broken] == [(2, "b,c")]


def test_an_empty_line_is_rejected_with_its_row(tmp_path):
    path = write(tmp_path / "a.csv", "text\na\n\nb\n")
    plan = plan_split(
        TextFiles(path), Columns("text", None, None, None), SplitSettings()
    )
    (row,) = plan["rejected_rows"].table().to_pylist()
    assert (row["row"], row["reason"]) == (1, "text is empty")


def test_empty_lines_of_other_files_are_no_rows(tmp_path):
    path = write(tmp_path / "a.csv", "text,label\na,x\n\nb,y\n\n")
    assert [row[1:] for row in rows_of(TextFiles(path))[0]] == [
        (0, "a", "x"),
        (1, "b", "y"),
    ]
    path = write(tmp_path / "b.csv", "\ntext\na\n\nb\n")
    (batch,) = TextFiles(path).batches(["text"])
    assert batch.columns["text"].to_pylist() == ["a", "b"]


def test_a_suffix_in_capitals_is_the_same_suffix(tmp_path):
    path = write(tmp_path / "A.TSV", "text\tlabel\none, two\tx\n")
    assert rows_of(TextFiles(path)) == ([("A.TSV", 0, "one, two", "x")], [])


def test_a_folder_of_shards_is_read_in_the_order_of_names(tmp_path):
    write(tmp_path / "b" / "2.csv", "text,label\nsecond,y\n")
    write(tmp_path / "1.csv", "text,label\nfirst,x\n")
    write(tmp_path / "_SUCCESS", "")
    rows, _ = rows_of(TextFiles(tmp_path))
    assert rows == [("1.csv", 0, "first", "x"), ("b/2.csv", 0, "second", "y")]


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "latin-1", "cp949", "utf-16"]
)
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_encodings_named_in_the_catalog(tmp_path, encoding, suffix):
    word = "\ud55c\uad6d\uc5b4" if encoding not in ("latin-1",) else "caf\xe9"
    content = (
        f"text,label\n{word},x\n"
        if suffix == "csv"
        else (json.dumps({"text": word, "label": "x"}, ensure_ascii=False) + "\n")
    )
    path = write(tmp_path / f"a.{suffix}", content.encode(encoding))
    rows, _ = rows_of(TextFiles(path, Format(encoding=encoding)))
    assert rows == [(f"a.{suffix}", 0, word, "x")]


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path):
    path = write(tmp_path / "a.csv", "\ufefftext,label\na,x\n")
    assert TextFiles(path).column_names == COLUMNS


LATIN = "caf\xe9".encode("latin-1")
HEAD = b"text,label\na,x\n"


@pytest.mark.parametrize(
    ("name", "content", "form", "said"),
    [
        ("a.csv", HEAD + LATIN, {}, "not utf-8 (byte 0xe9). * encoding: cp1252 (or"),
        ("a.csv", HEAD + b"\x81,y", {"encoding": "cp1252"}, "not cp1252 (byte 0x81)"),
        ("a.csv", HEAD.decode().encode("utf-16"), {}, "not utf-8 (byte 0xff)"),
        ("a.csv", HEAD + LATIN, {"encoding": "ascii"}, "not ascii (byte 0xe9)"),
        ("a.jsonl", LATIN, {"encoding": "ascii"}, "not ascii (byte 0xe9)"),
        ("a.csv", HEAD, {"encoding": "utf-16"}, "is not utf-16"),
        ("a.csv", HEAD, {"encoding": "utf-99"}, "encoding: 'utf-99' is unknown"),
        ("a.csv", HEAD, {"encoding": "hex"}, "encoding: 'hex' is unknown"),
        ("a.csv", HEAD, {"delimiter": "||"}, "delimiter: '||' is not one ASCII char"),
        ("a.csv", HEAD, {"delimiter": "\\t"}, "(a tab, in double quotes)"),
        ("a.csv", HEAD, {"delimiter": ""}, "delimiter: '' is not one ASCII character"),
        ("a.csv", HEAD, {"delimiter": "\xa7"}, "delimiter: '\xa7' is not one ASCII"),
        ("a.csv", HEAD, {"quote_char": "''"}, "quote_char: \"''\" is not one ASCII"),
        ("a.csv.gz", gzip.compress(CSV.encode(), mtime=0)[:-9], {}, "cannot be read ("),
        ("a.csv", b"sep=;\n" + HEAD, {}, "begins with Excel's line 'sep=;'"),
        ("a.jsonl", b'{\n  "text": "a"\n}\n', {}, "row 0 is no JSON object"),
        ("a.jsonl", b"{'text': 'a'}\n", {}, "give one object a line, with double"),
        ("a.jsonl", b'{"text": "a"},\n', {}, "row 0 is no JSON object ('Extra data"),
        ("a.jsonl", b"[" * 100_000, {}, "is one JSON array"),
    ],
)
def test_files_that_are_refused_in_one_sentence(tmp_path, name, content, form, said):
    path = write(tmp_path / name, content)
    with pytest.raises(RawTextsError) as error:
        files = TextFiles(path, Format(**form))
        list(files.batches(files.column_names))
    for part in said.split("*"):
        assert part.strip() in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv.gz", CSV.encode()),
        ("A.CSV.GZ", gzip.compress(CSV.encode(), mtime=0)),
        ("a.csv", gzip.compress(CSV.encode(), mtime=0)),
        ("a.csv", bz2.compress(CSV.encode())),
    ],
)
def test_packed_files_are_known_by_how_they_begin(tmp_path, name, content):
    rows, broken = rows_of(TextFiles(write(tmp_path / name, content)))
    assert [row[2] for row in rows] == GOOD["text"] and not broken


def test_names_for_a_file_without_a_header(tmp_path):
    path = write(tmp_path / "a.csv", "one,x\ntwo,y,z\n")
    files = TextFiles(path, Format(column_names=("text", "label")))
    assert files.column_names == COLUMNS
    assert rows_of(files) == (
        [("a.csv", 0, "one", "x")],
        [(1, "3 fields where 2 are expected", "two,y,z")],
    )


@pytest.mark.parametrize(
    ("content", "count"),
    [
        ('text,label\n"b,x\nc,y\nd",y\ne,x\n', 1),
        ('text,label\nb,"x\nc,y\nd"\ne,x\n', 1),
        ('text,label\n"two\nlines",x\ne,x\n', 0),
        ('text,label,more\n"two, or\nthree\nlines",x,\ne,x,\n', 0),
    ],
)
def test_fields_that_may_have_swallowed_rows_are_told(tmp_path, caplog, content, count):
    caplog.set_level("INFO")
    rows_of(TextFiles(write(tmp_path / "a.csv", content)))
    assert ("quote_char: null" in caplog.text) == bool(count)
    assert (f"a.csv: {count} fields hold line breaks" in caplog.text) == bool(count)


TEXTS_OF_FILES = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20
)
ENCODERS = {
    "csv": lambda rows: csv_text(rows, ","),
    "tsv": lambda rows: csv_text(rows, "\t"),
    "jsonl": lambda rows: "".join(
        json.dumps({"text": text, "label": label}, ensure_ascii=False) + "\n"
        for text, label in rows
    ),
}


def csv_text(rows, delimiter):
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, delimiter=delimiter, quoting=csv.QUOTE_ALL)
    writer.writerows([COLUMNS, *rows])
    return stream.getvalue()


def read_back(path, form):
    files = TextFiles(path, form)
    assert files.column_names == COLUMNS
    return rows_of(files)


@given(
    rows=st.lists(st.tuples(TEXTS_OF_FILES, TEXTS_OF_FILES), min_size=1, max_size=6),
    kind=st.sampled_from([*ENCODERS]),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32-le", "cp949"]),
    pack=st.sampled_from([bytes, gzip.compress, bz2.compress]),
    odd=st.tuples(st.integers(0), st.integers(0, 255)),
)
@settings(max_examples=60, deadline=None)
def test_rows_are_read_back_from_any_file_and_damage_is_told(
    tmp_path_factory, rows, kind, encoding, pack, odd
):
    """A file with a byte that is another gives rows, or a RawTextsError."""
    content = ENCODERS[kind](rows).encode(encoding, "ignore")
    text = content.decode(encoding)
    path = tmp_path_factory.getbasetemp() / f"any.{kind}"
    form = Format(encoding=encoding)
    path.write_bytes(pack(content))
    found, broken = read_back(path, form)
    if text == ENCODERS[kind](rows):
        assert [row[2:] for row in found] == rows and not broken
    damaged = bytearray(path.read_bytes())
    damaged[odd[0] % len(damaged)] = odd[1]
    path.write_bytes(damaged)
    try:
        files = TextFiles(path, form)
        names = [name for name in dict.fromkeys(COLUMNS) if name in files.column_names]
        for batch in files.batches(names):
            assert len(batch.rows) == len(batch.columns[names[0]]) if names else True
    except RawTextsError as error:
        assert str(path) in str(error)


def test_a_workbook_is_to_be_saved_as_csv(tmp_path):
    path = write(tmp_path / "a.xlsx", b"PK")
    with pytest.raises(RawTextsError, match="save its sheet as CSV"):
        rows_of(TextFiles(path))


def test_too_many_and_too_few_fields_cost_their_row(tmp_path):
    path = write(tmp_path / "a.csv", "text,label\na,x\nb,y,z\nc,x\nd\ne,y\n")
    rows, broken = rows_of(TextFiles(path))
    assert [(row, text) for _, row, text, _ in rows] == [(0, "a"), (2, "c"), (4, "e")]
    assert broken == [
        (1, "3 fields where 2 are expected", "b,y,z"),
        (3, "1 fields where 2 are expected", "d"),
    ]


@pytest.mark.parametrize("line", ['"b never closed,x', 'b,"never closed'])
def test_an_unclosed_quote_names_its_row(tmp_path, line):
    rest = "".join(f"t{i},y\n" for i in range(50))
    path = write(tmp_path / "a.csv", f"text,label\na,x\n{line}\n{rest}")
    with pytest.raises(RawTextsError) as error:
        rows_of(TextFiles(path))
    text = str(error.value)
    shown = line if line[0] == '"' else "never closed"
    assert text.startswith(f"{path}: the quote opened in row 1 ({shown!r}) is never")
    assert "never closed, so the rest of the file was read as part of that row" in text
    assert "set quote_char: null" in text


def test_lines_swallowed_by_a_quote_are_rejected_one_by_one(tmp_path):
    path = write(tmp_path / "a.csv", 'text,label\na,x\n"b,x\nc,y\nd",y,z\ne,x\n')
    rows, broken = rows_of(TextFiles(path))
    assert [text for *_, text, _ in rows] == ["a", "e"]
    reason = "3 fields where 2 are expected" if len(broken) == 1 else broken[0][1]
    assert len(broken) == 3
    assert reason.endswith("(a quote over several lines: is it closed?)")


def test_quotes_as_ordinary_characters(tmp_path):
    path = write(tmp_path / "a.csv", 'text,label\n"b,x\n5" pipe,y\n')
    rows, _ = rows_of(TextFiles(path, Format(quote_char=None)))
    assert [text for *_, text, _ in rows] == ['"b', '5" pipe']


def test_an_inch_sign_is_no_unclosed_quote(tmp_path):
    path = write(tmp_path / "a.csv", 'text,label\n5" pipe,x\nb,y\n')
    rows, broken = rows_of(TextFiles(path))
    assert [text for *_, text, _ in rows] == ['5" pipe', "b"] and not broken


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_an_empty_file(tmp_path, suffix):
    path = write(tmp_path / f"a.{suffix}", "")
    with pytest.raises(RawTextsError, match=r"is empty \(0 bytes\)"):
        _ = TextFiles(path).column_names


def test_a_header_and_nothing_else(tmp_path):
    path = write(tmp_path / "a.csv", "text,label\n")
    plan = plan_split(
        TextFiles(path), Columns(*COLUMNS[:1], None, "label", None), SplitSettings()
    )
    with pytest.raises(
        SplitError, match="raw_texts is empty: it has columns but no rows"
    ):
        plan["train_rows"].to_dataset()


@pytest.mark.parametrize(("mark", "shown"), [(";", '";"'), ("\t", r'"\t"')])
def test_a_header_with_another_delimiter(tmp_path, mark, shown):
    path = write(tmp_path / "a.csv", f"text{mark}label\none, two{mark}x\n")
    with pytest.raises(RawTextsError) as error:
        Columns("text", None, "label", None).check_present(TextFiles(path))
    assert str(error.value) == (
        f"raw_texts has the columns {f'text{mark}label'!r}. split.text_column is "
        "'text', which is not there. split.label_column is 'label', which is not "
        f"there. The one column looks like several with {shown} between them: set "
        f"delimiter: {shown} for raw_texts in conf/local/catalog.yml "
        f"(pandas.CSVDataset: load_args: {{sep: {shown}}})"
    )
    form = Format(delimiter=yaml.safe_load(shown))
    assert rows_of(TextFiles(path, form))[0] == [("a.csv", 0, "one, two", "x")]


def test_an_empty_cell_of_a_csv_file_is_no_group(tmp_path):
    lines = [f"text {i},x,{'' if i % 2 else i}" for i in range(200)]
    path = write(tmp_path / "a.csv", "\n".join(["text,label,who", *lines]))
    columns = Columns("text", None, "label", "who")
    settings = SplitSettings(group_column="who")
    table = plan_split(TextFiles(path), columns, settings)["rejected_rows"].table()
    assert table.column("row").to_pylist() == list(range(1, 200, 2))
    assert set(table.column("reason").to_pylist()) == {"who is empty"}


def test_a_column_that_is_there_twice(tmp_path):
    path = write(tmp_path / "a.csv", "text,text,label\na,b,x\n")
    with pytest.raises(
        RawTextsError, match=r"split\.text_column is 'text', which is there twice"
    ):
        Columns("text", None, "label", None).check_present(TextFiles(path))


def test_nul_bytes_are_rejected_with_a_hint(tmp_path):
    path = write(tmp_path / "a.csv", b"text,label\na\x00b,x\nc,y\n")
    plan = plan_split(
        TextFiles(path), Columns("text", None, "label", None), SplitSettings()
    )
    (row,) = plan["rejected_rows"].table().to_pylist()[:1]
    assert row == {
        "source": "a.csv",
        "row": 0,
        "reason": "text holds a NUL byte (UTF-16 or binary data?)",
        "excerpt": "a\\0b",
    }


def test_bad_json_lines_cost_their_line(tmp_path):
    lines = [
        b'{"text": "a", "label": 1}',
        b'{"text": "b", "label": ',
        b"[1]",
        b'"text"',
    ]
    lines += [b'{"text": "c", "label": "two"}', b'{"label": 3}', b'{"text": "\xff"}']
    path = write(tmp_path / "a.jsonl", b"\n".join(lines))
    rows, broken = rows_of(TextFiles(path))
    assert [row[1:] for row in rows] == [(0, "a", "1"), (4, "c", "two"), (5, None, "3")]
    assert broken[0][2] == (
        'Expecting value: line 1 column 24 (char 23): {"text": "b", "label": '
    )
    assert [(row, reason) for row, reason, _ in broken] == [
        (1, "not valid JSON"),
        (2, "not a JSON object"),
        (3, "not a JSON object"),
        (6, "not valid UTF-8"),
    ]


@pytest.mark.parametrize("task", ["label", "group"])
def test_a_number_has_one_name_in_every_block(tmp_path, monkeypatch, task):
    """Arrow reads blocks of one type; others are read line by line."""
    monkeypatch.setattr("flatout.engine.data.readers.json_reader.BLOCK_BYTES", 200)
    odd = [1.0, 1, "1", 2.5, 1]
    values = [[1, 1.0, odd[i % 5]][i // 20] for i in range(60)]
    lines = [
        json.dumps({"text": f"text {i}", "label": value})
        for i, value in enumerate(values)
    ]
    files = TextFiles(write(tmp_path / "a.jsonl", "\n".join(lines)))
    names = Columns("text", None, *(("label", None), (None, "label"))[task == "group"])
    found = [check_batch(batch, names) for batch in files.batches(COLUMNS)]
    assert len(found) > 6
    if task == "label":
        labels = [n for b in found for n in b.table.column("label").to_pylist()]
        assert labels == ["2.5" if value == 2.5 else "1" for value in values]
    else:
        groups = [h for b in found for h in group_hashes(b.groups).tolist()]
        assert len(set(groups)) == 2


def rejected_of(path, form=None, columns=CLASSES, **settings):
    """[(row, reason)] of the file's rejected rows."""
    files = TextFiles(path, form or Format())
    plan = plan_split(files, columns, SplitSettings(**settings))
    found = plan["rejected_rows"].table().to_pylist()
    return [(row["row"], row["reason"]) for row in found]


@pytest.mark.parametrize("mark", ["\u2028", "\x0c", "\x85"])
def test_a_mark_that_python_takes_for_an_end_of_line_ends_no_row(tmp_path, mark):
    path = write(tmp_path / "a.csv", f"text,label\na,x\nb{mark}c,y,z\nd,x\ne\n")
    faults = [f for f in rejected_of(path, max_rejected_fraction=1) if "fields" in f[1]]
    assert [row for row, _ in faults] == [1, 3]


def test_a_bad_row_in_another_encoding_is_told_by_its_byte(tmp_path, capfd):
    """Arrow hands over a row of three fields as text, which it cannot decode."""
    path = tmp_path / "a.csv"
    path.write_bytes(b"text,label\na,x\nb \x93q\x94,y,z\n")
    with pytest.raises(RawTextsError, match=r"is not utf-8 \(byte 0x93\)"):
        list(TextFiles(path).batches(["text", "label"]))
    assert capfd.readouterr().err == ""


def test_too_many_bad_rows_are_told_by_their_numbers(tmp_path):
    content = "text,label\n\na,x\n\n,y\nb,x\n,y\n"
    files = TextFiles(write(tmp_path / "a.csv", content))
    with pytest.raises(SplitError, match=r"2 x text is empty: rows 1, 3 of a\.csv"):
        plan_split(files, CLASSES, SplitSettings())["train_rows"].to_dataset()


def test_labels_are_told_by_their_rows(tmp_path):
    lines = [f"text {i},{i % 2}" for i in range(200)]
    rows = ["text,label", "", *lines, "text 3,0", "by itself,rare"]
    files = TextFiles(write(tmp_path / "a.csv", "\n".join(rows)))
    plan = plan_split(files, CLASSES, SplitSettings(max_rejected_fraction=1))
    report = plan["split_report"].value()
    assert report["several_labels_at"] == [
        ["'1' in row a.csv:3", "'0' in row a.csv:200"]
    ]
    assert report["labels_seen_once"] == {"rare": "row a.csv:201"}


def test_dates_in_json_stay_text(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "2020-01-01", "label": "x"}\n' * 3)
    assert [row[2] for row in rows_of(TextFiles(path))[0]] == ["2020-01-01"] * 3


def test_one_json_array_is_not_json_lines(tmp_path):
    path = write(tmp_path / "a.json", '[{"text": "a"}]')
    with pytest.raises(
        RawTextsError, match="is one JSON array; give one object a line"
    ):
        _ = TextFiles(path).column_names


@pytest.mark.parametrize("cut", [True, False])
def test_one_corrupt_shard_is_named(tmp_path, cut):
    for name in "abc":
        pq.write_table(pa.table(GOOD), tmp_path / f"{name}.parquet")
    path = tmp_path / "b.parquet"
    content = path.read_bytes()
    size = int.from_bytes(content[-8:-4], "little")
    footer = bytes(size) + content[-8:]
    write(path, content[:-20] if cut else content[: -size - 8] + footer)
    with pytest.raises(RawTextsError) as error:
        _ = TextFiles(tmp_path).column_names
    assert str(error.value).startswith(f"{path} cannot be read (")
    assert "Write this shard again, or take it out of the folder" in str(error.value)


def test_damage_inside_a_shard_is_found_while_reading(tmp_path):
    table = pa.table(
        {"text": [f"text {i}" * 20 for i in range(5000)], "label": ["x"] * 5000}
    )
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, write_page_checksum=True, compression="zstd")
    data = bytearray(path.read_bytes())
    data[300:400] = bytes(100)
    write(path, bytes(data))
    with pytest.raises(RawTextsError, match=r"a\.parquet cannot be read"):
        rows_of(TextFiles(path))


def test_shards_must_agree_on_columns(tmp_path):
    write(tmp_path / "a.csv", "text,label\na,x\n")
    write(tmp_path / "b.csv", "text\nb\n")
    with pytest.raises(RawTextsError, match=r"b\.csv lacks label, which a\.csv has"):
        TextFiles(tmp_path).digest(COLUMNS)
    assert len(TextFiles(tmp_path).digest(["text"])) == 32


def test_a_folder_without_shards_says_what_it_holds(tmp_path):
    write(tmp_path / "notes.txt", "hello")
    with pytest.raises(RawTextsError, match=r"it holds notes\.txt"):
        _ = TextFiles(tmp_path).files


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(
        RawTextsError, match="is not there: set its filepath in the catalog"
    ):
        _ = TextFiles(tmp_path / "no.csv").files


def test_an_unknown_kind_of_file(tmp_path):
    path = write(tmp_path / "a.dat", "PK")
    with pytest.raises(RawTextsError, match="what kind of file is this"):
        _ = TextFiles(path).column_names
    with pytest.raises(RawTextsError, match="format: 'xml' is none of csv, tsv, jsonl"):
        _ = TextFiles(path, Format(kind="xml")).column_names


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_the_entry_names_the_kind_of_a_file_without_a_suffix(tmp_path, kind):
    table = pd.DataFrame({"text": ["a", "b"], "label": ["x", "y"]})
    path = tmp_path / "part-00000"
    if kind == "csv":
        table.to_csv(path, index=False)
    else:
        table.to_json(path, orient="records", lines=True)
    for place in (path, tmp_path):
        rows, _ = rows_of(TextFiles(place, Format(kind=kind)))
        assert [row[2:] for row in rows] == [("a", "x"), ("b", "y")]


@contextmanager
def nobody():
    """As a user who is not root, whom permissions do not bind."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize("what", ["folder", "file"])
def test_without_permission_to_read(tmp_path, what):
    folder = tmp_path / "data"
    path = write(folder / "a.csv", "text,label\na,x\n")
    for parent in [*tmp_path.parents[:2], tmp_path]:
        parent.chmod(0o755)
    (folder if what == "folder" else path).chmod(0)
    try:
        with (
            nobody(),
            pytest.raises(RawTextsError, match="may not be read: give this user"),
        ):
            _ = TextFiles(folder).column_names
    finally:
        folder.chmod(0o755)


def test_a_row_longer_than_a_block_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("flatout.engine.data.readers.csv_reader.BLOCK_BYTES", 1 << 12)
    path = write(tmp_path / "a.csv", "text,label\n" + "a" * 10_000 + ",x\nb,y\n")
    with pytest.raises(RawTextsError, match="Is a quote never closed"):
        rows_of(TextFiles(path))


def test_a_text_of_50_mb(tmp_path):
    path = write(
        tmp_path / "a.csv", "text,label\n" + "word " * 10_000_000 + ",x\nb,y\n"
    )
    rows, _ = rows_of(TextFiles(path))
    assert [len(row[2]) for row in rows] == [50_000_000, 1]


def test_a_digest_follows_content_and_form(tmp_path):
    path = write(tmp_path / "a.csv", CSV)
    first = TextFiles(path).digest(COLUMNS)
    assert TextFiles(path).digest(COLUMNS) == first
    assert TextFiles(path, Format(quote_char=None)).digest(COLUMNS) != first
    write(path, CSV.replace("null", "nothing"))
    assert TextFiles(path).digest(COLUMNS) != first
