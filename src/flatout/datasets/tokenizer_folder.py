"""The tokenizer's folder, seen by transformers and seen by the encoder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset, DatasetError

from flatout.datasets._keyed import dataset_errors, log_changes
from flatout.engine.files.atomic_folder import is_current, stored_key, write_whole
from flatout.engine.tokenizing.tokenizer import TokenizerFile as _TokenizerFile

logger = logging.getLogger(__name__)


class TokenizerFolder(AbstractDataset[Any, Any]):
    """Saves a recipe where its key is new; loads the transformers tokenizer."""

    def __init__(
        self, *, filepath: str, metadata: dict[str, Any] | None = None
    ) -> None:
        self._folder = Path(filepath)
        self.metadata = metadata

    def load(self) -> Any:
        from transformers import AutoTokenizer

        self._check_there()
        return AutoTokenizer.from_pretrained(
            str(self._folder), local_files_only=True, trust_remote_code=False
        )

    def save(self, data: Any) -> None:
        if is_current(self._folder, data.key):
            logger.info("%s: unchanged, kept", self._folder.name)
            return
        log_changes(self._folder.name, data.key, stored_key(self._folder))
        with dataset_errors():
            write_whole(self._folder, data.key, data.write)

    def _check_there(self) -> None:
        if not self._exists():
            raise DatasetError(
                f"{self._folder} holds no tokenizer.json: run the pipeline that makes "
                "it (kedro run --pipelines=tokenize; for a model's folder, train), or "
                "let the entry of the catalog name the folder of one"
            )

    def _exists(self) -> bool:
        return (self._folder / "tokenizer.json").is_file()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._folder)}


class TokenizerFile(TokenizerFolder):
    """The same folder for the encoder, which needs neither transformers nor torch."""

    def load(self) -> Any:
        self._check_there()
        return _TokenizerFile(self._folder)

    def save(self, data: Any) -> None:
        """The other entry of this folder has written it; here it is only checked."""
        if not is_current(self._folder, data.key):
            super().save(data)
