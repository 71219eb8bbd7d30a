"""Datasets that are rewritten only if their content would change."""

from __future__ import annotations

import errno
import logging
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kedro.io import DatasetError

from flatout.datasets._entry import PathDataset, dataset_errors
from flatout.engine.files.arrow_folder import ArrowRecipe, write_recipe
from flatout.engine.files.atomic_write import clear_leftovers
from flatout.engine.files.content_key import ContentKey
from flatout.engine.files.keyed_folder import is_current, stored_key, write_whole

logger = logging.getLogger(__name__)


class KeyedDataset(PathDataset):
    """Base class of datasets that compute their data while saving it, so that data can
    be larger than memory, and unchanged data is not recomputed.

    Nodes return a recipe, which has a content `key` and knows how to create the data.
    If the stored key equals the recipe's key, the stored data is kept. Otherwise the
    changed fields of the key are logged, and the data is created. If that fails, the
    stored data is unchanged.
    """

    _level = logging.DEBUG
    """Level of the message about unchanged data. Classes for large data use INFO."""

    def save(self, data: Any) -> None:
        if not hasattr(data, "key"):
            raise DatasetError(
                f"{self._name} is a plain {type(data).__name__}, which "
                f"{type(self).__name__} does not store: leave out this catalog entry, "
                "or set a type of Kedro in it, such as json.JSONDataset for a dict, "
                "and huggingface.ArrowDataset for a datasets.Dataset"
            )
        if self._is_current(data.key):
            logger.log(self._level, "%s: unchanged, kept", self._name)
            return
        _log_changes(self._name, data.key, self._stored_key())
        with dataset_errors(), self._writing():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            clear_leftovers(self._path.parent)
            if hasattr(data, "prepare"):
                data.prepare(self._path.parent)
            self._write(data)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Context manager that adds the cause and a fix to the message of OSErrors."""
        try:
            yield
        except OSError as error:
            cause = str(error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                cause = "the disk is full (or a limit on file size was reached)"
            raise OSError(
                f"{self._path} could not be written: {cause}. It is unchanged. Free "
                "space, or keep the data elsewhere with --params=data_dir=/another/disk"
            ) from error

    @property
    def _name(self) -> str:
        return self._path.stem

    def _is_current(self, key: ContentKey) -> bool:
        stored = self._stored_key()
        return stored is not None and key.describes(stored)

    @abstractmethod
    def _stored_key(self) -> ContentKey | None:
        """Return the stored key, or None if there is no readable key."""

    @abstractmethod
    def _write(self, data: Any) -> None:
        """Write the data of a recipe. If writing fails, the stored data must stay
        unchanged."""


def _log_changes(name: str, key: ContentKey, stored: ContentKey | None) -> None:
    """Log why the data of `name` is created or recreated."""
    if stored is None:
        logger.debug("%s: not there yet, making it", name)
    else:
        changes = "; ".join(key.changes_since(stored))
        found = changes or "files that are missing or changed"
        logger.info("%s: made again (%s)", name, found)


class _KeyedFolder(KeyedDataset):
    """Base class of folder datasets whose content key is in a separate file."""

    @property
    def _name(self) -> str:
        return self._path.name

    def _is_current(self, key: ContentKey) -> bool:
        return is_current(self._path, key)

    def _stored_key(self) -> ContentKey | None:
        return stored_key(self._path)


class KeyedArrowDataset(_KeyedFolder):
    """A folder in the format of `huggingface.ArrowDataset`. It is saved from a recipe,
    and loads as a memory-mapped `datasets.Dataset`."""

    # It is not a subclass of Kedro's class, which imports torch.

    _level = logging.INFO

    def load(self) -> Any:
        from datasets import load_from_disk

        self._check_not_empty()
        return load_from_disk(str(self._path))

    def _write(self, data: ArrowRecipe) -> None:
        write_recipe(self._path, data)

    def _missing(self) -> str:
        return (
            f"{self._path} has no finished data: run the pipelines that make it "
            "(kedro run --pipelines=split,tokenize; of images --env=images "
            "--pipelines=images, of arrays --env=arrays --pipelines=arrays)"
        )

    def _exists(self) -> bool:
        has_state = (self._path / "state.json").is_file()
        return has_state or self._stored_key() is not None


class TokenizerFolder(_KeyedFolder):
    """A folder with a tokenizer. It loads as a transformers tokenizer."""

    def load(self) -> Any:
        from transformers import AutoTokenizer

        from flatout.engine.tokenizing.tokenizer import without_loading_options

        self._check_not_empty()
        options = {"local_files_only": True, "trust_remote_code": False}
        found = AutoTokenizer.from_pretrained(str(self._path), **options)
        return without_loading_options(found)

    def _write(self, data: Any) -> None:
        write_whole(self._path, data.key, data.write)

    def _missing(self) -> str:
        return (
            f"{self._path} has no tokenizer.json: run the pipeline that makes it "
            "(kedro run --pipelines=tokenize; for a model's folder, train), or let the "
            "entry of the catalog name the folder of one"
        )

    def _exists(self) -> bool:
        return (self._path / "tokenizer.json").is_file()


class TokenizerFile(TokenizerFolder):
    """A folder with a tokenizer. It loads as an encoder that requires neither
    transformers nor torch."""

    def load(self) -> Any:
        from flatout.engine.tokenizing.tokenizer import TokenizerFile as Encoder

        self._check_not_empty()
        return Encoder(self._path)

    def save(self, data: Any) -> None:
        """Write the folder if it is out of date. Usually the catalog entry of type
        TokenizerFolder has already written the same folder."""
        if not self._is_current(data.key):
            super().save(data)
