"""A data folder with tokens, for pipelines that begin with them."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.engine.families import LABEL_NAMES, VOCABULARY, token_rows


def write_tokens(folder: Path) -> Path:
    """48 train rows, 12 of the others, tokenizer and label names; gives `folder`."""
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
