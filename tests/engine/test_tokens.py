"""Facts about token rows that are known at the start without reading the rows."""

import tracemalloc
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pytest

from flatout.engine.files.arrow_folder import ArrowRecipe, write_recipe
from flatout.engine.files.content_key import ContentKey
from flatout.engine.files.keyed_folder import stored_facts, stored_key
from flatout.engine.parameters import SettingsError
from flatout.engine.rows.rows import open_rows
from flatout.engine.rows.token_facts import TokenFacts
from flatout.engine.rows.tokens import TokenRows
from flatout.engine.train.setup.job import check_rows
from tests.engine.families import LABEL_NAMES, VOCABULARY, token_rows
from tests.engine.runs import make_job
from tests.make import TableRecipe

TASK = "sequence-classification"
BATCH_ROWS = 500_000


@dataclass
class MachineRows(ArrowRecipe):
    """Rows of a few random ids, written in batches."""

    key: ContentKey
    rows: int
    _facts: TokenFacts = field(default_factory=TokenFacts)

    @property
    def schema(self):
        ids = pa.list_(pa.int32())
        return pa.schema(
            [("input_ids", ids), ("labels", pa.int64()), ("length", pa.int32())]
        )

    def facts(self):
        return self._facts.as_dict()

    def batches(self):
        for start_row in range(0, self.rows, BATCH_ROWS):
            count = min(BATCH_ROWS, self.rows - start_row)
            random = np.random.default_rng(start_row)
            lengths = random.integers(4, 13, count, np.int32)
            offsets = np.zeros(count + 1, np.int32)
            np.cumsum(lengths, out=offsets[1:])
            ids = random.integers(5, VOCABULARY.size, offsets[-1], np.int32)
            lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))
            labels = pa.array(random.integers(0, len(LABEL_NAMES), count))
            columns = [lists, labels, pa.array(lengths)]
            batch = pa.RecordBatch.from_arrays(columns, schema=self.schema)
            self._facts.add(batch)
            yield batch


def machine_rows(folder, count, key="k"):
    write_recipe(folder, MachineRows(ContentKey({"rows": key}), count))
    return open_rows(folder)


def counted(rows):
    """Return the facts computed in plain Python from the rows alone."""
    table = rows.table.to_pydict()
    labels = Counter(map(str, table.get("labels", [])))
    lengths = list(map(len, table["input_ids"]))
    return {
        "num_rows": len(lengths),
        "num_tokens": sum(lengths),
        "longest": max(lengths),
        "most_sequences": 1,
        "largest_id": max(max(ids, default=0) for ids in table["input_ids"]),
        "label_counts": dict(labels),
        "num_unlabelled": 0,
        "unlabelled": [],
    }


def overwrite(folder, what):
    """Replace every byte of the ids by `what`. The file stays readable."""
    (path,) = folder.glob("*.arrow")
    values = open_rows(folder)._chunks[0].columns["input_ids"][1].tobytes()
    data = path.read_bytes()
    assert data.count(values) == 1
    path.write_bytes(data.replace(values, what * len(values)))


def test_facts_are_noted_when_rows_are_written(tmp_path):
    rows = machine_rows(tmp_path / "t", 3000)
    assert stored_facts(tmp_path / "t")["tokens"] == counted(rows)
    assert rows.facts.mean_length == rows.lengths(np.arange(len(rows))).mean()


@pytest.mark.parametrize("task", [TASK, "regression", "causal-lm"])
def test_facts_of_rows_in_memory(task):
    rows = token_rows(task, 50)
    expected = counted(rows)
    if task == "regression":
        expected["label_counts"] = {}
    assert vars(rows.facts) == expected


def test_a_start_reads_no_tokens(tmp_path):
    """The key guarantees valid ids, so terabytes need not be checked again."""
    machine_rows(tmp_path / "t", 3000)
    overwrite(tmp_path / "t", b"\x7f")
    rows = open_rows(tmp_path / "t")
    assert max(rows.views(np.arange(1))[0]) == 0x7F7F7F7F
    job = make_job(tmp_path)
    check_rows(replace(job, train=rows))
    assert rows.facts.largest_id < VOCABULARY.size


def test_rows_without_facts_are_counted_once_and_told(tmp_path, caplog):
    folder = tmp_path / "t"
    table = machine_rows(tmp_path / "new", 3000).table
    write_recipe(folder, TableRecipe(table))
    key = stored_key(folder)
    with caplog.at_level("INFO", "flatout.engine"):
        assert vars(open_rows(folder).facts) == counted(open_rows(folder))
    (line,) = [m for m in caplog.messages if "reading all rows to compute" in m]
    assert str(folder) in line
    assert stored_key(folder) == key and stored_facts(folder)["rows"] == 3000
    caplog.clear()
    overwrite(folder, b"\x7f")
    with caplog.at_level("INFO", "flatout.engine"):
        assert open_rows(folder).facts.largest_id < VOCABULARY.size
    assert not caplog.messages


def test_facts_of_other_rows_do_not_count(tmp_path):
    machine_rows(tmp_path / "t", 100)
    part = TokenRows(open_rows(tmp_path / "t").table.slice(10, 20), tmp_path / "t")
    assert part.facts.num_rows == 20


def test_ids_targets_and_lengths_of_rows_in_several_chunks():
    table = token_rows(TASK, 60).table
    parts = [table.slice(0, 7), table.slice(7, 1), table.slice(8, 52)]
    rows = TokenRows(pa.concat_tables([pa.table(part) for part in parts]))
    chosen = np.random.default_rng(0).permutation(60)
    assert rows.labels_of(chosen).tolist() == [int(row) % 3 for row in chosen]
    ids = table.column("input_ids").to_pylist()
    assert rows.lengths(chosen).tolist() == [len(ids[row]) for row in chosen]
    views = rows.views(chosen)
    assert [view.tolist() for view in views] == [ids[row] for row in chosen]
    assert rows.facts.largest_id == max(map(max, ids))


def test_columns_cut_at_other_places_than_rows():
    table = token_rows(TASK, 10).table
    labels = pa.chunked_array([table["labels"].to_pylist()[:4], [1, 2, 0, 1, 2, 0]])
    rows = TokenRows(table.set_column(1, "labels", labels))
    assert rows.labels_of(np.arange(10)).tolist() == labels.to_pylist()


def test_a_start_and_a_step_copy_no_column(tmp_path):
    """The memory at the start does not grow with the rows: 12 bytes per row would be 24
    MB."""
    machine_rows(tmp_path / "t", 2_000_000)
    rows = open_rows(tmp_path / "t")
    job = replace(make_job(tmp_path), train=rows)
    tracemalloc.start()
    check_rows(job)
    chosen = np.arange(0, len(rows), 10_000)
    assert rows.facts.longest == rows.lengths(chosen).max() == 12
    assert set(rows.labels_of(chosen).tolist()) == {0, 1, 2}
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 2e6


def test_a_task_with_labels_refuses_rows_without(tmp_path):
    job = replace(make_job(tmp_path), test=token_rows("causal-lm"))
    with pytest.raises(SettingsError, match="needs a column labels in test_tokens"):
        check_rows(job)
