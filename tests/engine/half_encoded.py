"""Encodes rows and does not come to an end: once the disk is full,
then it is killed. Run by test_encode_faults.py."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

import datasets
from kedro.io import DatasetError

from flatout.datasets import KeyedArrowDataset
from flatout.engine.files import arrow_folder
from flatout.engine.files.arrow_folder import write_recipe
from flatout.engine.parameters import ModelSettings, TokenizeSettings
from flatout.engine.tokenizing.encoders import encode
from flatout.engine.tokenizing.encoders.encode import TokensRecipe
from flatout.engine.tokenizing.token_recipes import tokens_recipe
from flatout.engine.tokenizing.tokenizer import TokenizerFile

MODEL = ModelSettings(config={"model_type": "bert"})
TOKENIZE = TokenizeSettings(max_length=16, vocab_size=64)
LIMIT_BYTES = 50_000
BATCHES = 3
"""So many are written before the process is killed."""


def recipe_of(folder: Path) -> TokensRecipe:
    """For `folder/rows`, by `folder/tokenizer`."""
    rows = datasets.load_from_disk(str(folder / "rows"))
    tokenizer = TokenizerFile(folder / "tokenizer")
    return tokens_recipe("train_tokens", rows, tokenizer, [], MODEL, TOKENIZE)


def encode_on_a_full_disk(folder: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, before[1]))
    try:
        KeyedArrowDataset(filepath=str(folder / "tokens")).save(recipe_of(folder))
    except DatasetError as error:
        print(error, flush=True)  # noqa: T201
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def encode_until_killed(folder: Path) -> None:
    whole = arrow_folder.merge_batches

    def few(*arguments):
        for number, batch in enumerate(whole(*arguments)):
            if number == BATCHES:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    arrow_folder.merge_batches = few
    write_recipe(folder / "tokens", recipe_of(folder))


if __name__ == "__main__":
    encode.UNIT_BYTES = arrow_folder.MERGE_BYTES = 2_000
    encode_on_a_full_disk(Path(sys.argv[1]))
    encode_until_killed(Path(sys.argv[1]))
