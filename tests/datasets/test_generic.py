"""Kedro's own catalog entries in place of flatout's."""

import pandas as pd
import pytest
from kedro.io import DataCatalog, DatasetError

from flatout.engine.parameters import SettingsError
from flatout.project.data.entries import adapt
from tests.datasets.test_predict_files import Numbers


def opened(entries) -> DataCatalog:
    """Return a catalog with flatout's hook around it, as in a session."""
    catalog = DataCatalog.from_config(entries)
    adapt(catalog, entries)
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


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("train_rows", "pandas.CSVDataset"),
        ("test_tokens", "pandas.ParquetDataset"),
        ("tokenizer", "pickle.PickleDataset"),
        ("model", "pickle.PickleDataset"),
    ],
)
def test_an_entry_that_another_pipeline_reads_keeps_its_type(tmp_path, name, kind):
    entries = {name: {"type": kind, "filepath": str(tmp_path / "a")}}
    with pytest.raises(SettingsError, match=f"^catalog: {name}: {kind} .*remove this"):
        opened(entries)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["validation_rows", "train_tokens", "model"])
def test_an_entry_that_another_pipeline_reads_is_not_kept_in_memory(name):
    with pytest.raises(SettingsError, match=f"^catalog: {name}: io.MemoryDataset "):
        opened({name: {"type": "MemoryDataset"}})
