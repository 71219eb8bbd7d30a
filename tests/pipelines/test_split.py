"""The split pipeline with every kind of input, and its messages about bad input."""

import io
from collections import Counter
from pathlib import Path
from typing import ClassVar

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kedro.io import DatasetError, MemoryDataset
from kedro.runner import SequentialRunner
from kedro_datasets import huggingface

from flatout.datasets import HubTexts, TextFiles
from flatout.engine.parameters import SplitSettings, parse_settings
from flatout.pipelines.split import create_pipeline
from flatout.pipelines.split.nodes import split_rows
from tests.pipelines.tokens import text_catalog

SPLITS = ("train_rows", "validation_rows", "test_rows")
PARAMETERS = {"text_column": "review", "label_column": "stars"}
OPTIONS = SplitSettings(**PARAMETERS)


def frame_of(count):
    return pd.DataFrame(
        {
            "review": [f"review {i}: NA, null or \u00e9" for i in range(count)],
            "stars": [f"0{i % 4}" for i in range(count)],
        }
    )


def catalog_of(folder, raw_texts):
    model = {"config": {"model_type": "bert"}}
    settings = parse_settings({"split": PARAMETERS, "model": model})
    return text_catalog(folder, settings, raw_texts=raw_texts)


def run(catalog):
    SequentialRunner().run(create_pipeline(), catalog)
    return {name: catalog[name].load() for name in SPLITS}


def csv(folder):
    frame_of(300).to_csv(folder / "a.csv", index=False)
    return TextFiles(filepath=str(folder / "a.csv"))


def latin_csv(folder):
    frame_of(300).to_csv(folder / "a.csv", index=False, encoding="latin-1")
    return TextFiles(filepath=str(folder / "a.csv"), encoding="latin-1")


def saved_to_disk(folder):
    datasets.Dataset.from_pandas(frame_of(300)).save_to_disk(folder / "saved")
    return huggingface.ArrowDataset(path=str(folder / "saved"))


def hub_name(folder):
    """A name on the Hub and a folder are read in the same way by `load_dataset`."""
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
        saved_to_disk,
        hub_name,
        data_frame,
    ],
)
def test_every_kind_of_input_gives_the_same_splits(tmp_path, make):
    (tmp_path / "in").mkdir()
    rows = run(catalog_of(tmp_path, make(tmp_path / "in")))
    expected = split_rows(frame_of(300), OPTIONS, "sequence-classification")
    for name in SPLITS:
        assert rows[name].column_names == ["text", "label", "source_row"]
        assert set(rows[name]["text"][:]) == set(expected[name].to_dataset()["text"][:])
        assert set(rows[name]["label"][:]) <= {"00", "01", "02", "03"}


def test_a_second_run_keeps_everything_and_says_so(tmp_path, caplog):
    caplog.set_level("DEBUG", "flatout")
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


@pytest.mark.parametrize("kind", ["CSV", "JSON", "Parquet"])
def test_an_entry_of_hugging_face_with_one_split_is_its_rows(tmp_path, kind):
    """`load_dataset` returns a plain file as a dict with one split, called train."""
    path = tmp_path / f"reviews.{kind.lower()}"
    rows = datasets.Dataset.from_pandas(frame_of(60))
    getattr(rows, f"to_{kind.lower()}")(str(path))
    entry = getattr(huggingface, f"{kind}Dataset")(path=str(path))
    assert list(entry.load()) == ["train"]
    catalog = catalog_of(tmp_path, entry)
    run(catalog)
    assert catalog["split_report"].load()["rows_in"] == 60
    found = [text for name in SPLITS for text in catalog[name].load()["text"]]
    assert sorted(found) == sorted(frame_of(60)["review"])


def test_a_stream_is_refused():
    stream = datasets.Dataset.from_pandas(frame_of(20)).to_iterable_dataset()
    with pytest.raises(ValueError, match="rows are read more than once"):
        split_rows(stream, OPTIONS, "sequence-classification")


def test_text_files_are_read_only_and_check_their_encoding(tmp_path):
    with pytest.raises(DatasetError, match="read-only"):
        TextFiles(filepath="a.csv").save(1)
    with pytest.raises(DatasetError, match="encoding: 'klingon' is unknown"):
        TextFiles(filepath="a.csv", encoding="klingon")


def test_a_name_that_the_hub_does_not_know_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(
        DatasetError, match=r"in the cache .* and on the Hugging Face Hub"
    ):
        HubTexts(name="nobody/no-such-data", cache_dir=str(tmp_path)).load()


class Counted(io.FileIO):
    """A file that records how many bytes are read, by its name."""

    bytes_read: ClassVar[Counter[str]] = Counter()

    def read(self, size=-1):
        data = super().read(size)
        self.bytes_read[str(self.name)] += len(data)
        return data

    def readinto(self, buffer):
        size = super().readinto(buffer)
        self.bytes_read[str(self.name)] += size
        return size


def write_rows(path, bad):
    """Write about 8 MB. `bad` adds rows and labels whose lines have to be looked up."""
    frame = frame_of(50_000)
    frame["review"] += " and so on, for as long as a review takes to be written\n" * 2
    if bad:
        frame.loc[49_990, "review"], frame.loc[49_991, "stars"] = " ", "seen once"
        frame = pd.concat([frame, frame.tail(3).assign(stars="another")])
    match path.suffix:
        case ".csv":
            frame.to_csv(path, index=False)
        case ".jsonl":
            frame.to_json(path, orient="records", lines=True)
        case ".parquet":
            frame.to_parquet(path)
    return len(frame)


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_fresh_split_reads_its_file_at_most_three_times(
    tmp_path, monkeypatch, kind, bad
):
    """All bytes are counted, including those for finding the header."""
    path = tmp_path / f"raw.{kind}"
    rows = write_rows(path, bad)
    opened, streamed, parquet = Path.open, pa.input_stream, pq.ParquetFile
    monkeypatch.setattr(Counted, "bytes_read", Counter())
    monkeypatch.setattr(
        Path,
        "open",
        lambda p, *a, **k: Counted(p) if p == path else opened(p, *a, **k),
    )
    monkeypatch.setattr(pa, "input_stream", lambda p, **_: streamed(Counted(p)))
    monkeypatch.setattr(pq, "ParquetFile", lambda p, **k: parquet(Counted(p), **k))
    catalog = catalog_of(tmp_path, TextFiles(filepath=str(path)))
    run(catalog)
    report = catalog["split_report"].load()
    assert (report["rows_in"], report["rejected"]) == (rows, int(bad))
    times = Counted.bytes_read[str(path)] / path.stat().st_size
    assert 1.5 < times < 3.1
