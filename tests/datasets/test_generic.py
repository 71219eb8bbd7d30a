"""Kedro's own entries in the place of flatout's."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from datasets import Dataset
from kedro.io import DataCatalog, DatasetError
from kedro.pipeline import Pipeline
from kedro.runner import SequentialRunner

from flatout.engine.parameters import SettingsError, parse_settings
from flatout.pipelines import split, tokenize
from flatout.project.data.entries import adapt, refuse
from tests.datasets.test_predict_files import Numbers

SPLITS = ("train", "validation", "test")
PARAMETERS = {
    "split": {},
    "model": {"config": {"model_type": "bert", "max_position_embeddings": 64}},
    "tokenize": {"max_length": 32, "vocab_size": 100},
    "train": {},
}
OURS = {
    "rows": "flatout.datasets.KeyedArrowDataset",
    "tokens": "flatout.datasets.KeyedArrowDataset",
    "report": "flatout.datasets.KeyedJSONDataset",
    "rejected": "flatout.datasets.KeyedParquetDataset",
}
KEDROS = {
    "rows": "pandas.ParquetDataset",
    "tokens": "pandas.ParquetDataset",
    "report": "json.JSONDataset",
    "rejected": "pandas.CSVDataset",
}


def opened(entries) -> DataCatalog:
    """With flatout's hook around it, as in a session."""
    catalog = DataCatalog.from_config(entries)
    faults = adapt(catalog, entries)
    refuse(faults, split.create_pipeline() + tokenize.create_pipeline())
    return catalog


@pytest.mark.parametrize(
    ("kind", "place", "options"),
    [
        ("pandas.CSVDataset", "filepath", {"save_args": {"index": False}}),
        ("pandas.JSONDataset", "filepath", {}),
        ("pandas.ParquetDataset", "filepath", {}),
        ("huggingface.ArrowDataset", "path", {}),
        ("huggingface.CSVDataset", "path", {"load_args": {"split": "train"}}),
    ],
)
def test_predictions_go_into_any_table(tmp_path, kind, place, options):
    path = tmp_path / "numbers"
    catalog = opened({"predictions": {"type": kind, place: str(path), **options}})
    with pytest.raises(DatasetError, match="row 6 cannot be read"):
        catalog.save("predictions", Numbers(fails=True))
    assert not path.exists()
    catalog.save("predictions", Numbers())
    found = catalog.load("predictions")
    frame = found if isinstance(found, pd.DataFrame) else found.to_pandas()
    assert frame.to_dict("list") == {"number": [0, 1, 2, 3, 4, 5]}


def entries_of(folder, types) -> dict:
    place = {
        f"{name}_{kind}": {"type": types[kind], "filepath": f"{folder}/{name}_{kind}"}
        for name in SPLITS
        for kind in ("rows", "tokens")
    }
    for name, kind in (
        ("rejected_rows", "rejected"),
        ("split_report", "report"),
        ("token_report", "report"),
    ):
        place[name] = {"type": types[kind], "filepath": f"{folder}/{name}"}
    for name, view in (("tokenizer", "Folder"), ("tokenizer_file", "File")):
        kind = f"flatout.datasets.Tokenizer{view}"
        place[name] = {"type": kind, "filepath": f"{folder}/tokenizer"}
    return place


def test_rows_and_tokens_are_those_of_our_own_entries(tmp_path):
    """Labels that are numbers by their looks, texts that pandas takes for missing."""
    texts = [f"{word} film {n}" for n in range(40) for word in ("NA", "null", "good")]
    labels = [f"00{n % 3}" for n in range(len(texts))]
    texts[7:9] = ["NA", "null"]
    raw = pd.DataFrame({"text": texts, "label": labels})
    raw.loc[5, "text"] = ""
    pipeline = split.create_pipeline() + tokenize.create_pipeline()
    catalogs = {}
    for name, types in (("ours", OURS), ("kedros", KEDROS)):
        catalog = catalogs[name] = opened(entries_of(tmp_path / name, types))
        catalog["raw_texts"] = raw
        for group in PARAMETERS:
            catalog[f"params:{group}"] = getattr(parse_settings(PARAMETERS), group)
        catalog["params:model.task"] = "sequence-classification"
        SequentialRunner().run(pipeline, catalog)
    ours, kedros = catalogs["ours"], catalogs["kedros"]
    for kind in ("rows", "tokens"):
        for name in (f"{part}_{kind}" for part in SPLITS):
            expected, found = ours.load(name), kedros.load(name)
            assert isinstance(found, Dataset)
            assert found.to_dict() == expected.to_dict(), name
    assert pd.read_csv(tmp_path / "kedros/rejected_rows")["row"].tolist() == [5]
    report = json.loads((tmp_path / "kedros/split_report").read_text())
    assert report == ours.load("split_report")


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("train_rows", "pandas.CSVDataset", "write type: pandas.ParquetDataset"),
        ("test_tokens", "pandas.JSONDataset", "write type: pandas.ParquetDataset"),
        ("tokenizer", "pickle.PickleDataset", "leave out this entry"),
    ],
)
def test_an_entry_that_loses_something_is_refused_before_the_run(
    tmp_path, name, kind, told
):
    entries = {name: {"type": kind, "filepath": str(tmp_path / "a")}}
    with pytest.raises(SettingsError, match=f"^catalog: {name}: {kind} .*{told}"):
        opened(entries)
    refuse(
        adapt(DataCatalog.from_config(entries), entries), Pipeline([])
    )  # others may run
    assert list(tmp_path.iterdir()) == []
