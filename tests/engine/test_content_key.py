"""Keys and digests are equal for equal rows and different for different rows."""

import hashlib

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from flatout.engine.files.content_key import ContentKey, arrow_digest
from flatout.engine.files.identity import digest_of

ROWS = st.lists(
    st.tuples(
        st.one_of(st.none(), st.text(max_size=6)),
        st.lists(st.integers(0, 9), max_size=4),
    ),
    min_size=1,
    max_size=30,
)


def table_of(rows):
    texts, ids = zip(*rows, strict=True)
    return pa.table(
        {
            "text": pa.array(texts, pa.string()),
            "ids": pa.array(ids, pa.list_(pa.int32())),
        }
    )


@given(ROWS, st.integers(1, 7))
@settings(max_examples=25)
def test_a_digest_does_not_see_how_rows_are_cut_or_kept(rows, size):
    table = table_of(rows)
    digest = arrow_digest([table])
    assert arrow_digest(table.to_batches(max_chunksize=size)) == digest
    padded = pa.concat_tables([table_of([("before", [1])]), table])
    assert arrow_digest([padded.slice(1)]) == digest
    wide = table.set_column(0, "text", table["text"].cast(pa.large_string()))
    assert arrow_digest([wide]) == digest


@given(ROWS, ROWS)
@settings(max_examples=25)
def test_different_rows_have_different_digests(first, second):
    same = arrow_digest([table_of(first)]) == arrow_digest([table_of(second)])
    assert same == (first == second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["ab", "c"], ["a", "bc"]),
        (["a", None], [None, "a"]),
        (["", None], [None, None]),
        ([[1], [2]], [[1, 2], []]),
        ([1, 2], [2, 1]),
        ([1.0, 2.0], [1.0, 2.5]),
        ([True, False], [False, True]),
    ],
)
def test_bounds_nulls_and_order_count(first, second):
    tables = [pa.table({"a": pa.array(values)}) for values in (first, second)]
    assert arrow_digest([tables[0]]) != arrow_digest([tables[1]])


def test_names_of_columns_count_and_their_order_does_not():
    table = pa.table({"a": [1], "b": [2]})
    assert arrow_digest([table]) == arrow_digest([table.select(["b", "a"])])
    assert arrow_digest([table]) != arrow_digest([table.rename_columns(["a", "c"])])


def test_dictionaries_are_their_values():
    plain = pa.table({"a": ["x", "y", "x"]})
    coded = pa.table({"a": pa.array(["x", "y", "x"]).dictionary_encode()})
    assert arrow_digest([plain]) == arrow_digest([coded])


def test_a_key_does_not_depend_on_the_order_of_its_fields():
    assert (
        ContentKey({"a": 1, "b": [2]}).digest == ContentKey({"b": [2], "a": 1}).digest
    )


B = 'b: "y" -> "x"'
MANY = [f"class {n}" for n in range(20)]


@pytest.mark.parametrize(
    ("then", "now", "changes"),
    [
        ({"a": 1, "b": "y"}, {"a": 1, "b": "x", "n": None}, [B, "n: absent -> null"]),
        ({"rows": "0" * 32}, {"rows": "f" * 32}, ["rows: changed"]),
        ({}, {"rows": {"a.json": "f" * 32}}, ["rows: changed"]),
        ({"n": MANY, "a": 1}, {"n": [], "a": 2}, ["a: 1 -> 2", "n: changed"]),
    ],
)
def test_changes_name_the_fields(then, now, changes):
    """The values of digests and long lists are not shown."""
    assert ContentKey(now).changes_since(ContentKey(then)) == changes


def test_a_memory_mapped_file_has_the_digest_of_its_rows(tmp_path):
    table = pa.table({"ids": pa.array(np.arange(1000) % 7)})
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=64)
    mapped = pa.ipc.open_stream(pa.memory_map(str(tmp_path / "a.arrow"))).read_all()
    assert arrow_digest([mapped]) == arrow_digest([table])


def test_a_lock_file_of_emacs_is_not_code(tmp_path):
    """Emacs creates such a broken link while a file has changes that are not saved."""
    (tmp_path / "rows.py").write_bytes(b"code")
    (tmp_path / ".#rows.py").symlink_to("me@host.1234:1")
    expected = hashlib.sha256(b"code").hexdigest()
    assert expected.startswith(digest_of(tmp_path.glob("*.py")))
