"""A training job as paths and JSON values, for processes that start from nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from flatout.engine.building import Vocabulary
from flatout.engine.data.content_key import arrow_digest
from flatout.engine.data.whole_folder import stored_key
from flatout.engine.job import TrainJob
from flatout.engine.settings import Settings
from flatout.engine.tokens import TokenRows


@dataclass(frozen=True)
class JobFiles:
    """Token folders, and what is known of tokenizer and labels."""

    train: str
    validation: str
    test: str
    vocabulary: Mapping[str, Any]
    label_names: tuple[str, ...]
    data_key: str
    """Content key of the train tokens."""

    @classmethod
    def of(
        cls,
        splits: Mapping[str, TokenRows],
        vocabulary: Vocabulary,
        label_names: Sequence[str],
        folder: Path,
    ) -> JobFiles:
        """Of `splits` train, validation and test; rows that are in no folder yet are
        written under `folder`."""
        return cls(
            **{name: _folder_of(rows, folder / name) for name, rows in splits.items()},
            vocabulary=asdict(vocabulary),
            label_names=tuple(label_names),
            data_key=token_key(splits["train"]),
        )

    @classmethod
    def of_datasets(
        cls,
        splits: Mapping[str, Any],
        tokenizer: Any,
        label_names: Sequence[str],
        folder: Path,
    ) -> JobFiles:
        """Of token Datasets and a transformers tokenizer."""
        rows = {name: TokenRows.from_dataset(found) for name, found in splits.items()}
        return cls.of(rows, Vocabulary.of(tokenizer), label_names, folder)

    def open(self, settings: Settings, work_folder: Path) -> TrainJob:
        vocabulary = dict(self.vocabulary)
        special = tuple(vocabulary.pop("special_token_ids"))
        return TrainJob(
            settings=settings,
            train=TokenRows.open(Path(self.train)),
            validation=TokenRows.open(Path(self.validation)),
            test=TokenRows.open(Path(self.test)),
            vocabulary=Vocabulary(special_token_ids=special, **vocabulary),
            label_names=tuple(self.label_names),
            work_folder=work_folder,
            metrics_file=work_folder / "metrics.jsonl",
            data_key=self.data_key,
        )


def token_key(rows: TokenRows) -> str:
    """The key that the tokens were written with; else a digest of the rows."""
    stored = stored_key(rows.folder) if rows.folder else None
    return stored.digest if stored else arrow_digest([rows.table])


def _folder_of(rows: TokenRows, folder: Path) -> str:
    # A slice of a Dataset still names the files of the whole.
    if rows.folder is not None and len(TokenRows.open(rows.folder)) == len(rows):
        return str(rows.folder.absolute())
    folder.mkdir(parents=True, exist_ok=True)
    table = rows.table
    with pa.OSFile(str(folder / "data.arrow"), "wb") as sink:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return str(folder.absolute())
