"""Files of every type, and all errors that files can contain."""

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
from hypothesis import given, settings, strategies as st

from flatout.engine.data.columns import Columns
from flatout.engine.data.raw_texts import RawTextsError
from flatout.engine.data.readers.file_reader import Format
from flatout.engine.data.readers.text_files import TextFiles
from flatout.engine.data.row_facts import group_hashes
from flatout.engine.data.rows import check_batch
from flatout.engine.data.split import SplitError
from tests.make import text_recipes

COLUMNS = ["text", "label"]
CLASSES = Columns("text", None, "label", None)
GOOD = {
    "text": ["one NA", "null", 'two\nlines, "quoted"'],
    "label": ["007", "nan", "x"],
}


def rows_of(files):
    """Return [(source, row, text, label)] and [(row, reason, excerpt)] of all
    batches."""
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
    """Write the same three rows as each type of file."""
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
def test_an_empty_line_is_no_row_but_part_of_a_quoted_text(tmp_path, encoding, end):
    """This is also the behaviour of pandas."""
    lines = ["text", "a", "", "b,c", '"d', "", 'd"', "", "e"]
    content = (end.join(lines) + end).encode(encoding)
    path = write(tmp_path / "a.csv", content)
    (batch,) = TextFiles(path, Format(encoding=encoding)).batches(["text"])
    assert batch.columns["text"].to_pylist() == ["a", f"d{end}{end}d", "e"]
    assert batch.rows.tolist() == [0, 2, 3]
    assert [(b.row, b.excerpt) for b in batch.broken] == [(1, "b,c")]


def test_a_folder_of_shards_is_read_in_the_order_of_names(tmp_path):
    folder = tmp_path / "shards"
    write(tmp_path / "far" / "2.csv", "text,label\nsecond,y\n")
    write(folder / "1.csv", "text,label\nfirst,x\n")
    write(folder / "_parts" / "0.csv", "text,label\nhidden,x\n")
    write(folder / "_SUCCESS", "")
    (folder / "b").symlink_to(tmp_path / "far")
    (tmp_path / "far" / "loop").symlink_to(folder)
    rows, _ = rows_of(TextFiles(folder))
    assert rows == [("1.csv", 0, "first", "x"), ("b/2.csv", 0, "second", "y")]


@pytest.mark.parametrize(
    ("encoding", "content", "warns"),
    [
        ("cp1252", "caf\xe9".encode(), True),
        ("cp1252", b"A" * 2**20 + "caf\xe9".encode(), True),
        ("cp1252", "caf\xe9".encode("cp1252"), False),
        ("cp1252", "caf\xe9".encode() + b" \xe9", False),
        ("cp1252", b"cafe", False),
        ("cp949", "caf\xe9".encode(), True),
        ("cp949", "짜장면".encode("cp949"), False),
        ("utf-8", "caf\xe9".encode(), False),
        ("utf-16", "text\ncaf\xe9".encode("utf-16"), False),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
def test_a_utf_8_file_that_is_read_in_another_encoding_is_named(
    tmp_path, caplog, suffix, encoding, content, warns
):
    head = b"" if encoding == "utf-16" else b"text\n"
    packed = gzip.compress if suffix == "csv.gz" else bytes
    write(tmp_path / "1.csv", "text\na\n".encode(encoding))
    path = write(tmp_path / f"2.{suffix}", packed(head + content))
    for _ in TextFiles(tmp_path, Format(encoding=encoding)).batches(["text"]):
        pass
    shown = "챕" if encoding == "cp949" else "Ã©"
    named = (
        f"{path} is a UTF-8 file that is read as {encoding}, so that é becomes {shown}"
    )
    assert [named in record.message for record in caplog.records] == [True] * warns


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
        ("a.jsonl", b'{\n  "text": "a"\n}\n', {}, "row 0 is not a JSON object"),
        ("a.jsonl", b"{'text': 'a'}\n", {}, "give one object per line, with double"),
        ("a.jsonl", b'{"text": "a"},\n', {}, "row 0 is not a JSON object ('Extra data"),
        ("a.jsonl", b"[" * 100_000, {}, "is one JSON array"),
        (
            "a.json",
            b'[{"text": "a"}]',
            {},
            "is one JSON array; give one object per line",
        ),
        ("a.csv", b"", {}, "is empty (0 bytes)"),
        ("a.jsonl", b"", {}, "is empty (0 bytes)"),
        ("a.parquet", b"", {}, "is empty (0 bytes)"),
        ("a.xlsx", b"PK", {}, "save its sheet as CSV"),
        ("a.dat", b"PK", {}, "has an unknown file type"),
        ("a.dat", b"PK", {"kind": "xml"}, "format: 'xml' is unknown; valid: csv, tsv"),
        ("a.csv", HEAD + b"b \x93q\x94,y,z\n", {}, "is not utf-8 (byte 0x93)"),
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


FIELDS = "{} fields instead of 2"
SWALLOWED = f"{FIELDS.format(3)} (a quote over several lines: is it closed?)"
JSON = [
    b'{"text": "a", "label": 1}',
    b'{"text": "b", "label": ',
    b"[1]",
    b'"text"',
    b'{"text": "c", "label": "two"}',
    b'{"label": 3}',
    b'{"text": "\xff"}',
]


@pytest.mark.parametrize(
    ("name", "content", "form", "rows", "broken"),
    [
        ("A.TSV", "text\tlabel\none, two\tx\n", {}, [(0, "one, two", "x")], []),
        ("a.csv", "\ufefftext,label\na,x\n", {}, [(0, "a", "x")], []),
        (
            "a.csv",
            "text,label\ncaf\xe9,x\n".encode("latin-1"),
            {"encoding": "latin-1"},
            [(0, "caf\xe9", "x")],
            [],
        ),
        (
            "a.csv",
            "\ntext,label\na,x\n\nb,y\n\n",
            {},
            [(0, "a", "x"), (1, "b", "y")],
            [],
        ),
        (
            "a.csv",
            "one,x\ntwo,y,z\n",
            {"column_names": ("text", "label")},
            [(0, "one", "x")],
            [(1, FIELDS.format(3), "two,y,z")],
        ),
        (
            "a.csv",
            "text,label\na,x\nb,y,z\nc,x\nd\ne,y\n",
            {},
            [(0, "a", "x"), (2, "c", "x"), (4, "e", "y")],
            [(1, FIELDS.format(3), "b,y,z"), (3, FIELDS.format(1), "d")],
        ),
        *(
            (
                "a.csv",
                f"text,label\na,x\nb{mark}c,y,z\nd,x\n",
                {},
                [(0, "a", "x"), (2, "d", "x")],
                [(1, FIELDS.format(3), f"b{mark}c,y,z")],
            )
            for mark in ("\u2028", "\x0c", "\x85")
        ),
        (
            "a.csv",
            'text,label\na,x\n"b,x\nc,y\nd",y,z\ne,x\n',
            {},
            [(0, "a", "x"), (2, "e", "x")],
            [(1, SWALLOWED, line) for line in ('"b,x', "c,y", 'd",y,z')],
        ),
        (
            "a.csv",
            'text,label\n"b,x\n5" pipe,y\n',
            {"quote_char": None},
            [(0, '"b', "x"), (1, '5" pipe', "y")],
            [],
        ),
        (
            "a.csv",
            'text,label\n5" pipe,x\nb,y\n',
            {},
            [(0, '5" pipe', "x"), (1, "b", "y")],
            [],
        ),
        (
            "a.jsonl",
            '{"text": "2020-01-01", "label": "x"}\n',
            {},
            [(0, "2020-01-01", "x")],
            [],
        ),
        (
            "a.jsonl",
            b"\n".join(JSON),
            {},
            [(0, "a", "1"), (4, "c", "two"), (5, None, "3")],
            [
                (
                    1,
                    "not valid JSON",
                    "Expecting value: line 1 column 24 (char 23): " + JSON[1].decode(),
                ),
                (2, "not a JSON object", "[1]"),
                (3, "not a JSON object", '"text"'),
                (6, "not valid UTF-8", '{"text": "\\xff"}'),
            ],
        ),
    ],
)
def test_what_is_read_and_what_costs_its_row(
    tmp_path, name, content, form, rows, broken
):
    files = TextFiles(write(tmp_path / name, content), Format(**form))
    assert files.column_names == COLUMNS
    assert rows_of(files) == ([(name, *row) for row in rows], broken)


def test_a_nul_byte_is_shown_as_text(tmp_path):
    files = TextFiles(write(tmp_path / "a.csv", b"text,label\na\x00b,x\n"))
    (batch,) = files.batches(CLASSES.names)
    (row,) = check_batch(batch, CLASSES).rejected.to_pylist()
    assert row["reason"] == "text contains a NUL byte (UTF-16 or binary data?)"
    assert row["excerpt"] == "a\\0b"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("text,label\n", "raw_texts is empty: it has columns but no rows"),
        (
            "text,label\n\na,x\n\n,y\nb,x\n,y\n",
            r"2 x text is empty: rows 1, 3 of a\.csv",
        ),
    ],
)
def test_files_whose_rows_are_of_no_use(tmp_path, content, said):
    files = TextFiles(write(tmp_path / "a.csv", content))
    with pytest.raises(SplitError, match=said):
        text_recipes(files)["train_rows"].to_dataset()


def test_what_holds_no_file_of_a_known_kind(tmp_path):
    write(tmp_path / "notes.txt", "hello")
    with pytest.raises(RawTextsError, match=r"found: notes\.txt"):
        _ = TextFiles(tmp_path).files
    with pytest.raises(RawTextsError, match="is not there: correct the path in"):
        _ = TextFiles(tmp_path / "no.csv").files


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
    """A file with a changed byte gives rows or a RawTextsError."""
    content = ENCODERS[kind](rows).encode(encoding, "ignore")
    text = content.decode(encoding)
    path = tmp_path_factory.getbasetemp() / f"any.{kind}"
    form = Format(encoding=encoding)
    path.write_bytes(pack(content))
    files = TextFiles(path, form)
    assert files.column_names == COLUMNS
    found, broken = rows_of(files)
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


@pytest.mark.parametrize("task", ["label", "group"])
def test_a_number_has_one_name_in_every_block(tmp_path, monkeypatch, task):
    """Arrow reads blocks of a single type. Other blocks are read line by line."""
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


def test_labels_are_told_by_their_rows(tmp_path):
    lines = [f"text {i},{i % 2}" for i in range(200)]
    rows = ["text,label", "", *lines, "text 3,0", "by itself,rare"]
    files = TextFiles(write(tmp_path / "a.csv", "\n".join(rows)))
    plan = text_recipes(files, max_rejected_fraction=1)
    report = plan["split_report"].value()
    assert report["several_labels_at"] == [
        ["'1' in row a.csv:3", "'0' in row a.csv:200"]
    ]


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
    with pytest.raises(
        RawTextsError,
        match=r"b\.csv lacks label, which a\.csv has \(its columns: .*rename",
    ):
        TextFiles(tmp_path).digest(COLUMNS)
    assert len(TextFiles(tmp_path).digest(["text"])) == 32


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
    """Become a user who is not root, because permissions do not apply to root."""
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
            pytest.raises(RawTextsError, match="cannot be read: give this user"),
        ):
            _ = TextFiles(folder).column_names
    finally:
        folder.chmod(0o755)


def test_a_row_longer_than_a_block_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("flatout.engine.data.readers.csv_reader.BLOCK_BYTES", 1 << 12)
    path = write(tmp_path / "a.csv", "text,label\n" + "a" * 10_000 + ",x\nb,y\n")
    with pytest.raises(RawTextsError, match="Is a quote never closed"):
        rows_of(TextFiles(path))


@pytest.mark.slow
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
