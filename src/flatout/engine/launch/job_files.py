"""A training job as paths and JSON values, for processes that start without state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from flatout.engine.files.atomic_folder import stored_key
from flatout.engine.files.content_key import arrow_digest
from flatout.engine.parameters import Settings
from flatout.engine.rows.rows import SplitRows, open_rows, rows_from_dataset
from flatout.engine.rows.vocabulary import Vocabulary
from flatout.engine.tokenizing.token_keys import check_tokens_match
from flatout.engine.train.setup.job import TrainJob


@dataclass(frozen=True)
class JobFiles:
    """Folders of rows, and the facts about tokenizer and labels."""

    train: str
    validation: str
    test: str
    vocabulary: Mapping[str, Any] | None
    label_names: tuple[str, ...]
    data_key: str
    """Content key of the train tokens."""
    tokenizer_file: str | None = None

    @classmethod
    def of(
        cls,
        splits: Mapping[str, SplitRows],
        vocabulary: Vocabulary | Mapping[str, Any] | None,
        label_names: Sequence[str],
        folder: Path,
        tokenizer_file: str | None = None,
        data_key: str | None = None,
    ) -> JobFiles:
        """Make the job of `splits` train, validation and test; rows that are not in a
        folder are written under `folder`. `data_key`: None for that of train."""
        for rows in splits.values():
            _ = rows.facts  # counted here once, not by each rank
        if isinstance(vocabulary, Vocabulary):
            vocabulary = asdict(vocabulary)
        found = {name: _folder_of(rows, folder / name) for name, rows in splits.items()}
        return cls(
            train=found["train"],
            validation=found["validation"],
            test=found["test"],
            vocabulary=vocabulary,
            label_names=tuple(label_names),
            data_key=data_key or token_key(splits["train"]),
            tokenizer_file=tokenizer_file,
        )

    @classmethod
    def checked(
        cls,
        settings: Settings,
        splits: Mapping[str, Any],
        tokenizer: Any | None,
        label_names: Sequence[str],
        folder: str,
    ) -> JobFiles:
        """Make the job for Datasets of tokens and these settings. Raises
        StaleTokensError. Rows outside of a folder are written to `folder`/rows."""
        vocabulary = None
        if tokenizer is not None:
            check_tokens_match(splits, settings, tokenizer, label_names)
            vocabulary = Vocabulary.of(tokenizer)
        rows = {name: rows_from_dataset(found) for name, found in splits.items()}
        file, place = tokenizer_file(tokenizer), Path(folder) / "rows"
        return cls.of(rows, vocabulary, label_names, place, file)

    def open(self, settings: Settings, work_folder: Path) -> TrainJob:
        vocabulary = None
        if stored := self.vocabulary:  # in JSON, a tuple is a list
            special = tuple(stored["special_token_ids"])
            vocabulary = Vocabulary(**{**stored, "special_token_ids": special})
        return TrainJob(
            settings=settings,
            train=open_rows(Path(self.train)),
            validation=open_rows(Path(self.validation)),
            test=open_rows(Path(self.test)),
            vocabulary=vocabulary,
            label_names=tuple(self.label_names),
            work_folder=work_folder,
            metrics_file=work_folder / "metrics.jsonl",
            data_key=self.data_key,
            tokenizer_file=self.tokenizer_file,
        )


def token_key(rows: SplitRows) -> str:
    """Return the key that the tokens were written with; else a digest of the rows."""
    stored = stored_key(rows.folder) if rows.folder else None
    return stored.digest if stored else arrow_digest([rows.table])


def tokenizer_file(tokenizer: Any | None) -> str | None:
    """Return tokenizer.json of a transformers tokenizer's folder, if it exists."""
    if tokenizer is None:
        return None
    file = Path(tokenizer.name_or_path or "", "tokenizer.json").absolute()
    return str(file) if file.is_file() else None


def _folder_of(rows: SplitRows, folder: Path) -> str:
    # A slice of a Dataset still names the files of the whole Dataset.
    if rows.folder is not None and len(open_rows(rows.folder)) == len(rows):
        return str(rows.folder.absolute())
    folder.mkdir(parents=True, exist_ok=True)
    table = rows.table
    with pa.OSFile(str(folder / "data.arrow"), "wb") as sink:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return str(folder.absolute())
