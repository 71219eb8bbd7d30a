"""A data folder with tokens, for pipelines that start with tokens, and the entries of
the pipelines that create them."""

import json
from pathlib import Path
from typing import Any

import datasets
from kedro.io import DataCatalog, MemoryDataset
from kedro_datasets.json import JSONDataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from flatout.datasets import (
    KeyedArrowDataset,
    KeyedJSONDataset,
    KeyedParquetDataset,
    TokenizerFile,
    TokenizerFolder,
)
from flatout.engine.parameters import Settings
from tests.engine.families import LABEL_NAMES, VOCABULARY, token_rows


def write_tokens(folder: Path) -> Path:
    """Write 48 train rows, 12 rows of each other split, a tokenizer and label names to
    `folder`, and return `folder`."""
    for name, count in (("train", 48), ("validation", 12), ("test", 12)):
        rows = datasets.Dataset(token_rows("sequence-classification", count).table)
        rows.save_to_disk(str(folder / "05_model_input" / f"{name}_tokens"))
    pieces = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3, "[MASK]": 4}
    pieces |= {f"p{i}": i for i in range(5, VOCABULARY.size)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(pieces, unk_token="[UNK]")),
        pad_token="[PAD]",
        unk_token="[UNK]",
        mask_token="[MASK]",
    )
    tokenizer.save_pretrained(str(folder / "06_models" / "tokenizer"))
    (folder / "06_models" / "label_names.json").write_text(json.dumps(LABEL_NAMES))
    return folder


ARROWS = [
    f"{s}_{n}" for s in ("train", "validation", "test") for n in ("rows", "tokens")
]
"""Catalog entries of the rows and tokens of each split."""


def text_catalog(folder: Path, settings: Settings, **entries: Any) -> DataCatalog:
    """Return the entries and parameters of split and tokenize, below `folder`, and the
    given entries, which have priority."""
    given = dict(settings)
    known = {
        **{name: KeyedArrowDataset(filepath=f"{folder}/{name}") for name in ARROWS},
        "rejected_rows": KeyedParquetDataset(filepath=f"{folder}/rejected.parquet"),
        "split_report": KeyedJSONDataset(filepath=f"{folder}/split_report.json"),
        "token_report": MemoryDataset(),
        "token_figure": MemoryDataset(),
        "label_names": JSONDataset(filepath=f"{folder}/label_names.json"),
        "tokenizer": TokenizerFolder(filepath=f"{folder}/tokenizer"),
        "tokenizer_file": TokenizerFile(filepath=f"{folder}/tokenizer"),
        "params:model.task": MemoryDataset(settings.model.task),
        "params:tokenize.max_length": MemoryDataset(settings.tokenize.max_length),
        **{f"params:{name}": MemoryDataset(given[name]) for name in given},
    }
    return DataCatalog({**known, **entries})
