"""The split pipeline: wiring, every kind of input, bad input's texts."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import datasets
import pandas as pd
import pytest
from kedro.io import DataCatalog, DatasetError, MemoryDataset
from kedro.runner import SequentialRunner

from flatout.datasets import (
    HubTexts,
    KeyedArrowDataset,
    KeyedJSONDataset,
    KeyedParquetDataset,
    TextFiles,
)
from flatout.pipelines.split import create_pipeline
from flatout.pipelines.split.nodes import split_rows

SPLITS = ("train_rows", "validation_rows", "test_rows")
PARAMETERS = {"text_column": "review", "label_column": "stars"}


def frame_of(count):
    return pd.DataFrame(
        {
            "review": [f"review {i}: NA, null or \u00e9" for i in range(count)],
            "stars": [f"0{i % 4}" for i in range(count)],
        }
    )


def catalog_of(folder, raw_texts, task="sequence-classification", **split):
    return DataCatalog(
        {
            "raw_texts": raw_texts,
            "params:split": MemoryDataset({**PARAMETERS, **split}),
            "params:model.task": MemoryDataset(task),
            "rejected_rows": KeyedParquetDataset(
                filepath=str(folder / "rejected.parquet")
            ),
            "split_report": KeyedJSONDataset(
                filepath=str(folder / "split_report.json")
            ),
            **{n: KeyedArrowDataset(filepath=str(folder / n)) for n in SPLITS},
        }
    )


def run(catalog):
    SequentialRunner().run(create_pipeline(), catalog)
    return {name: catalog[name].load() for name in SPLITS}


def test_what_goes_in_and_comes_out():
    pipeline = create_pipeline()
    assert pipeline.inputs() == {"raw_texts", "params:split", "params:model.task"}
    assert pipeline.outputs() == {"rejected_rows", "split_report", *SPLITS}


def test_the_node_is_a_plain_function():
    recipes = split_rows(frame_of(300), PARAMETERS, "sequence-classification")
    rows = recipes["train_rows"].to_dataset()
    assert rows.column_names == ["text", "label", "source_row"]
    assert set(rows["label"][:]) == {"00", "01", "02", "03"}


def csv(folder):
    frame_of(300).to_csv(folder / "a.csv", index=False)
    return TextFiles(filepath=str(folder / "a.csv"))


def latin_csv(folder):
    frame_of(300).to_csv(folder / "a.csv", index=False, encoding="latin-1")
    return TextFiles(filepath=str(folder / "a.csv"), encoding="latin-1")


def csv_with_bom(folder):
    frame_of(300).to_csv(folder / "a.csv", index=False, encoding="utf-8-sig")
    return TextFiles(filepath=str(folder / "a.csv"))


def json_lines(folder):
    frame_of(300).to_json(folder / "a.jsonl", orient="records", lines=True)
    return TextFiles(filepath=str(folder / "a.jsonl"))


def parquet_shards(folder):
    for index, start in enumerate(range(0, 300, 100)):
        part = frame_of(300).iloc[start : start + 100]
        part.to_parquet(folder / f"{index}.parquet")
    return TextFiles(filepath=str(folder))


def arrow(folder):
    frame_of(300).to_feather(folder / "a.feather")
    return TextFiles(filepath=str(folder / "a.feather"))


def saved_to_disk(folder):
    from kedro_datasets.huggingface import ArrowDataset

    datasets.Dataset.from_pandas(frame_of(300)).save_to_disk(folder / "saved")
    return ArrowDataset(path=str(folder / "saved"))


def hub_name(folder):
    """A name on the Hub and a folder go the same way through `load_dataset`."""
    (folder / "hub").mkdir()
    frame_of(300).to_parquet(folder / "hub" / "train.parquet")
    return HubTexts(name=str(folder / "hub"), cache_dir=str(folder / "cache"))


def data_frame(folder):
    return MemoryDataset(frame_of(300))


@pytest.mark.parametrize(
    "make",
    [
        csv,
        latin_csv,
        csv_with_bom,
        json_lines,
        parquet_shards,
        arrow,
        saved_to_disk,
        hub_name,
        data_frame,
    ],
)
def test_every_kind_of_input_gives_the_same_splits(tmp_path, make):
    (tmp_path / "in").mkdir()
    rows = run(catalog_of(tmp_path, make(tmp_path / "in")))
    expected = split_rows(frame_of(300), PARAMETERS, "sequence-classification")
    for name in SPLITS:
        assert set(rows[name]["text"][:]) == set(expected[name].to_dataset()["text"][:])
        assert set(rows[name]["label"][:]) <= {"00", "01", "02", "03"}


def test_a_second_run_keeps_everything_and_says_so(tmp_path, caplog):
    caplog.set_level("INFO")
    run(catalog_of(tmp_path, MemoryDataset(frame_of(300))))
    assert "unchanged" not in caplog.text
    run(catalog_of(tmp_path, MemoryDataset(frame_of(300))))
    for name in (*SPLITS, "rejected", "split_report"):
        assert f"{name}: unchanged, kept" in caplog.text


def test_the_quarantine_is_there_when_the_run_stops(tmp_path):
    frame = frame_of(100)
    frame.loc[:4, "review"] = None
    catalog = catalog_of(tmp_path, MemoryDataset(frame))
    with pytest.raises(DatasetError, match=r"5 of 100 rows \(5\.0%\) cannot be used"):
        run(catalog)
    found = catalog["rejected_rows"].load()
    assert found["row"].tolist() == [0, 1, 2, 3, 4]
    assert set(found["reason"]) == {"review is missing"}


def test_a_report_of_what_became_of_the_rows(tmp_path):
    frame = pd.concat([frame_of(300), frame_of(5)], ignore_index=True)
    frame.loc[299, "review"] = " "
    catalog = catalog_of(tmp_path, MemoryDataset(frame))
    run(catalog)
    report = catalog["split_report"].load()
    assert (report["rows_in"], report["rejected"], report["duplicates"]) == (305, 1, 5)
    assert report["texts_in_two_splits"] == 0


def test_several_splits_in_the_data_ask_which(tmp_path):
    rows = datasets.Dataset.from_pandas(frame_of(20))
    data = datasets.DatasetDict({"train": rows, "test": rows})
    with pytest.raises(ValueError, match=r"split: train\+test"):
        split_rows(data, PARAMETERS, "sequence-classification")


def test_a_stream_is_refused():
    stream = datasets.Dataset.from_pandas(frame_of(20)).to_iterable_dataset()
    with pytest.raises(ValueError, match="rows are read more than once"):
        split_rows(stream, PARAMETERS, "sequence-classification")


def test_numbers_of_classes_become_their_names():
    features = datasets.Features(
        {
            "review": datasets.Value("string"),
            "stars": datasets.ClassLabel(names=["bad", "good"]),
        }
    )
    values = {
        "review": [f"r {i}" for i in range(200)],
        "stars": [i % 2 for i in range(200)],
    }
    rows = datasets.Dataset.from_dict(values, features=features)
    recipes = split_rows(rows, PARAMETERS, "sequence-classification")
    assert set(recipes["train_rows"].to_dataset()["label"][:]) == {"bad", "good"}


def test_text_files_are_read_only_and_check_their_encoding(tmp_path):
    with pytest.raises(DatasetError, match="read-only"):
        TextFiles(filepath="a.csv").save(1)
    with pytest.raises(DatasetError, match="encoding: klingon is unknown"):
        TextFiles(filepath="a.csv", encoding="klingon")


def test_a_name_that_the_hub_does_not_know_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(
        DatasetError, match=r"in the cache .* and on the Hugging Face Hub"
    ):
        HubTexts(name="nobody/no-such-data", cache_dir=str(tmp_path)).load()


WITHOUT_TORCH = """
    import sys
    import pandas as pd
    from flatout.datasets import DocstringCorpus, KeyedArrowDataset, KeyedJSONDataset
    from flatout.datasets import KeyedParquetDataset, TextFiles
    from flatout.pipelines.split import create_pipeline
    from flatout.pipelines.split.nodes import split_rows

    texts = [f"text {i}" for i in range(100)]
    frame = pd.DataFrame({"text": texts, "label": ["a", "b"] * 50})
    recipes = split_rows(frame, {}, "sequence-classification")
    KeyedArrowDataset(filepath=sys.argv[1]).save(recipes["train_rows"])
    KeyedArrowDataset(filepath=sys.argv[1]).load()
    print("imported:", sorted({"torch", "transformers"} & set(sys.modules)))
"""


@pytest.mark.process
def test_split_never_imports_torch(tmp_path):
    code = textwrap.dedent(WITHOUT_TORCH)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "rows")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "imported: []\n"
    assert len(datasets.load_from_disk(tmp_path / "rows")) == 82
