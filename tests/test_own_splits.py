"""Entries that the user provides replace the built-in data."""

import pandas as pd
import pytest
from kedro.io import DataCatalog, MemoryDataset

from flatout.datasets import TextFiles
from flatout.engine.parameters import SettingsError, SplitSettings
from flatout.pipelines.split.nodes import split_rows
from flatout.project.data.entries import adapt
from flatout.project.data.origin import origin_of


def files(folder, names):
    for name in names:
        texts = [f"{name} text {n}" for n in range(200)]
        frame = pd.DataFrame({"text": texts, "label": ["a", "b"] * 100})
        frame.to_csv(folder / f"{name}.csv", index=False)
    entries = {f"raw_{n}_texts": str(folder / f"{n}.csv") for n in names}
    catalog = DataCatalog({k: TextFiles(filepath=v) for k, v in entries.items()})
    catalog["raw_texts"] = MemoryDataset("the built-in corpus")
    return catalog, entries


def test_the_entries_are_read_in_place_of_raw_texts(tmp_path):
    catalog, entries = files(tmp_path, ("train", "test"))
    adapt(catalog, entries)
    recipes = split_rows(
        catalog.load("raw_texts"), SplitSettings(), "sequence-classification"
    )
    texts = recipes["test_rows"].to_dataset()["text"][:]
    assert texts == [f"test text {n}" for n in range(200)]
    dealt = [len(recipes[f"{n}_rows"].to_dataset()) for n in ("train", "validation")]
    assert sum(dealt) == 200


def test_a_change_of_one_file_is_noticed(tmp_path):
    catalog, entries = files(tmp_path, ("train", "test"))
    adapt(catalog, entries)
    before = origin_of(catalog, "raw_texts")
    assert before["name"] == "raw_train_texts, raw_test_texts"
    assert origin_of(catalog, "raw_texts") == before
    (tmp_path / "test.csv").write_text("text,label\nnew,a\n")
    assert origin_of(catalog, "raw_texts")["state"] != before["state"]


def test_other_splits_without_train_are_refused(tmp_path):
    catalog, entries = files(tmp_path, ("test",))
    with pytest.raises(SettingsError, match="raw_test_texts without raw_train_texts"):
        adapt(catalog, entries)


@pytest.mark.parametrize("own", [{}, {"predict_images": "new"}])
def test_the_images_of_the_user_are_predicted_instead_of_the_digits(tmp_path, own):
    digits = {"type": "flatout.datasets.Digits", "filepath": str(tmp_path / "digits")}
    conf = {"raw_images": digits, "predict_images": digits}
    for name, folder in {"raw_images": "photos", **own}.items():
        place = tmp_path / folder
        place.mkdir()
        (place / "a.png").touch()
        conf[name] = {"type": "flatout.datasets.RawFiles", "filepath": str(place)}
    adapt(catalog := DataCatalog.from_config(conf), conf)
    expected = tmp_path / own.get("predict_images", "photos")
    assert catalog.load("predict_images") == expected
