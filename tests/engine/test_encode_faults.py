"""A tokenize run that never ends well, and the next one."""

from __future__ import annotations

import os
import resource
import signal
from itertools import islice
from pathlib import Path

import datasets
import pytest

from flatout.engine.files import arrow_folder, atomic_write
from flatout.engine.files.arrow_folder import write_recipe
from flatout.engine.files.atomic_folder import StorageError, is_current, write_whole
from flatout.engine.parameters import ModelSettings, TokenizeSettings
from flatout.engine.tokenizing.encoders import encode
from flatout.engine.tokenizing.encoders.encode import TokensRecipe
from flatout.engine.tokenizing.token_recipes import tokens_recipe
from flatout.engine.tokenizing.tokenizer import TokenizerFile, TokenizerRecipe

ROWS, LIMIT_BYTES = 4_000, 50_000
BATCHES = 3
"""So many are written before the process is killed."""
MODEL = ModelSettings(config={"model_type": "bert"})
TOKENIZE = TokenizeSettings(max_length=16, vocab_size=64)


def recipe_of(folder: Path) -> TokensRecipe:
    """For `folder/rows`, by `folder/tokenizer`."""
    rows = datasets.load_from_disk(str(folder / "rows"))
    tokenizer = TokenizerFile(folder / "tokenizer")
    return tokens_recipe("train_tokens", rows, tokenizer, [], MODEL, TOKENIZE)


def encode_on_a_full_disk(folder: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, before[1]))
    try:
        write_recipe(folder / "tokens", recipe_of(folder))
    except StorageError as error:
        (folder / "told").write_text(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def encode_until_killed(folder: Path) -> None:
    whole = arrow_folder.merge_batches

    def few(*arguments):
        yield from islice(whole(*arguments), BATCHES)
        os.kill(os.getpid(), signal.SIGKILL)

    arrow_folder.merge_batches = few
    write_recipe(folder / "tokens", recipe_of(folder))


@pytest.mark.process
def test_half_written_tokens_are_never_taken_and_the_next_run_makes_them_whole(
    tmp_path, monkeypatch
):
    texts = [f"row {i} of many words in a row" for i in range(ROWS)]
    rows = datasets.Dataset.from_dict({"text": texts})
    rows.save_to_disk(tmp_path / "rows")
    made = TokenizerRecipe(rows, MODEL, TOKENIZE)
    write_whole(tmp_path / "tokenizer", made.key, made.write)
    if not (pid := os.fork()):
        try:
            encode.UNIT_BYTES = arrow_folder.MERGE_BYTES = 2_000
            encode_on_a_full_disk(tmp_path)
            encode_until_killed(tmp_path)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert (tmp_path / "told").read_text() == (
        f"{tmp_path / 'tokens'} could not be written: the disk is full (or a limit on "
        "file size was reached). The folder is unchanged. Free space, or keep the "
        "data elsewhere with --params=data_dir=/another/disk"
    )

    recipe = recipe_of(tmp_path)
    (half,) = tmp_path.glob(".tokens.writing-*")
    assert not is_current(tmp_path / "tokens", recipe.key)
    assert not is_current(half, recipe.key)
    monkeypatch.setattr(encode, "UNIT_BYTES", 20_000)
    monkeypatch.setattr(atomic_write, "ABANDONED_S", 0.0)  # as on the next day
    assert write_recipe(tmp_path / "tokens", recipe) == ROWS
    assert is_current(tmp_path / "tokens", recipe.key) and not half.exists()
    tokens = datasets.load_from_disk(str(tmp_path / "tokens"))
    assert tokens.to_dict() == recipe.to_dataset().to_dict()
