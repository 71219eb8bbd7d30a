"""`split.drop_rows` leaves out raw rows, given by number or by an audit's file."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flatout.engine.data.readers.text_files import TextFiles
from flatout.engine.data.row_facts import text_hashes
from flatout.engine.parameters import SettingsError
from tests.make import SPLITS, numbers_in, raw_rows, split_recipes

ROWS = [(number, "ab"[number % 2]) for number in range(120)]


def numbers_of(kind, made):
    return {name: numbers_in(kind, made[name]) for name in SPLITS}


@pytest.mark.parametrize("kind", ["texts", "arrays"])
def test_numbers_leave_rows_out_and_all_others_where_they_are(tmp_path, kind):
    raw = raw_rows(kind, tmp_path, ROWS)
    whole = split_recipes(kind, raw)
    less = split_recipes(kind, raw, drop_rows=[3, 50])
    for name, rows in numbers_of(kind, whole).items():
        kept = [number for number in rows if number not in (3, 50)]
        assert numbers_in(kind, less[name]) == kept
    report = less["report"].value()
    assert (report["dropped"], report["rejected"]) == (2, 0)
    assert not less["train"].key.describes(whole["train"].key)
    with pytest.raises(SettingsError, match=r"no row 120; raw_\w+ has the rows 0 to 1"):
        split_recipes(kind, raw, drop_rows=120)["report"].value()


def test_a_file_names_rows_by_their_texts(tmp_path):
    """This works even if rows were added before them and one of them was removed."""
    whole = split_recipes("texts", raw_rows("texts", tmp_path, ROWS))
    rows = whole["train"].to_dataset().data.table.slice(0, 5)
    file = str(tmp_path / "suspect_rows.parquet")
    pq.write_table(pa.table({"text_hash": text_hashes(rows)}), file)
    out = [int(text.split()[2]) for text in rows["text"].to_pylist()]
    others = [(number + 200, "a") for number in range(20)]
    raw = raw_rows("texts", tmp_path, [*others, *(r for r in ROWS if r[0] != out[0])])
    left = numbers_of("texts", split_recipes("texts", raw, drop_rows=file))["train"]
    before = numbers_in("texts", whole["train"])
    assert [number for number in left if number < 200] == [
        number for number in before if number not in out
    ]
    other = raw_rows("texts", tmp_path, [(n + 500, "ab"[n % 2]) for n in range(99)])
    with pytest.raises(SettingsError, match="belongs to other data: raw_texts has the"):
        split_recipes("texts", other, drop_rows=file)["report"].value()


@pytest.mark.parametrize("name", ["absent.parquet", "other.parquet"])
def test_a_file_of_another_kind_is_refused(tmp_path, name):
    pq.write_table(pa.table({"row": np.arange(3)}), tmp_path / "other.parquet")
    raw, path = raw_rows("texts", tmp_path, ROWS), str(tmp_path / name)
    with pytest.raises(SettingsError, match=r"drop_rows: .* cannot be read .*audit of"):
        split_recipes("texts", raw, drop_rows=path)


def test_numbers_do_not_name_rows_of_several_files(tmp_path):
    folder = tmp_path / "texts"
    for name, first in (("a", 0), ("b", 60)):
        frame = raw_rows("texts", folder, ROWS[first : first + 60])
        frame.to_parquet(folder / f"{name}.parquet")
    images = raw_rows("images", tmp_path / "images", ROWS)
    for kind, raw in (("texts", TextFiles(folder)), ("images", images)):
        with pytest.raises(SettingsError, match="several files, so that numbers do"):
            split_recipes(kind, raw, drop_rows=[3])["report"].value()
