"""The files that the predict pipeline reads and writes through the catalog."""

import pyarrow as pa
import pytest
from kedro.io import DatasetError

from flatout.datasets import ParquetStream, TokenizerFile, TransformersModel


class Numbers:
    """Two batches, followed by an error if requested."""

    schema = pa.schema([("number", pa.int64())])

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def batches(self):
        for start in (0, 3):
            numbers = pa.array(range(start, start + 3))
            yield pa.RecordBatch.from_arrays([numbers], schema=self.schema)
        if self.fails:
            raise ValueError("row 6 cannot be read")


def test_batches_become_one_file(tmp_path):
    dataset = ParquetStream(filepath=str(tmp_path / "new" / "numbers.parquet"))
    assert not dataset.exists()
    dataset.save(Numbers())
    assert dataset.load()["number"].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_file_is_whole_or_as_it_was(tmp_path):
    dataset = ParquetStream(filepath=str(tmp_path / "numbers.parquet"))
    with pytest.raises(DatasetError, match="is not there: run the pipeline"):
        dataset.load()
    dataset.save(Numbers())
    with pytest.raises(DatasetError, match="row 6 cannot be read"):
        dataset.save(Numbers(fails=True))
    assert len(dataset.load()) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["numbers.parquet"]


def test_a_folder_without_a_model_is_named(tmp_path):
    missing = TransformersModel(filepath=str(tmp_path / "model"))
    with pytest.raises(
        DatasetError, match=r"no model to load: .*, and it is not there"
    ):
        missing.load()
    with pytest.raises(DatasetError, match=r"has no tokenizer\.json: run the pipeline"):
        TokenizerFile(filepath=str(tmp_path)).load()
