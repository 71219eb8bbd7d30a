"""A tokenize run that never ends well, and the next one."""

from __future__ import annotations

import signal
import subprocess
import sys

import datasets
import pytest

from flatout.datasets import KeyedArrowDataset
from flatout.engine.files import atomic_write
from flatout.engine.files.atomic_folder import is_current
from flatout.engine.tokenizing.encoders import encode
from tests.conftest import PROJECT
from tests.engine.half_encoded import MODEL, TOKENIZE, recipe_of
from tests.make import saved_tokenizer

ROWS = 4000


@pytest.mark.process
def test_half_written_tokens_are_never_taken_and_the_next_run_makes_them_whole(
    tmp_path, monkeypatch
):
    texts = [f"row {i} of many words in a row" for i in range(ROWS)]
    rows = datasets.Dataset.from_dict({"text": texts})
    rows.save_to_disk(tmp_path / "rows")
    saved_tokenizer(tmp_path / "tokenizer", rows, MODEL, TOKENIZE)

    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.half_encoded", str(tmp_path)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.strip() == (
        f"{tmp_path / 'tokens'} could not be written: the disk is full (or a limit on "
        "file size was reached). It is unchanged. Free space, or keep the "
        "data elsewhere with --params=data_dir=/another/disk"
    )

    recipe = recipe_of(tmp_path)
    (half,) = tmp_path.glob(".tokens.writing-*")
    assert not is_current(tmp_path / "tokens", recipe.key)
    assert not is_current(half, recipe.key)
    monkeypatch.setattr(encode, "UNIT_BYTES", 20_000)
    monkeypatch.setattr(atomic_write, "ABANDONED_S", 0.0)  # as on the next day
    KeyedArrowDataset(filepath=str(tmp_path / "tokens")).save(recipe)
    assert is_current(tmp_path / "tokens", recipe.key) and not half.exists()
    tokens = datasets.load_from_disk(str(tmp_path / "tokens"))
    assert tokens.to_dict() == recipe.to_dataset().to_dict()
