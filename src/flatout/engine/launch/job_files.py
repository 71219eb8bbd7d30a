"""Describe a training job by paths and JSON values, to pass it to new processes."""

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
    """The folders of the rows, and information about the tokenizer and the labels."""

    train: str
    validation: str
    test: str
    vocabulary: Mapping[str, Any] | None
    label_names: tuple[str, ...]
    data_key: str
    """The content key of the training tokens."""
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
        """Describe the job for the splits train, validation and test. Rows that are not
        in a folder yet are written to `folder`. `data_key` defaults to train's key."""
        for rows in splits.values():
            _ = rows.facts  # computed once here, instead of in each rank
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
        """Describe the job for Datasets of tokens. Rows that are not in a folder yet
        are written to `folder`/rows. Raises StaleTokensError if the tokens were made
        with other settings, another tokenizer or other labels."""
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
    """Return the key stored with the tokens, or a digest of the rows without one."""
    stored = stored_key(rows.folder) if rows.folder else None
    return stored.digest if stored else arrow_digest([rows.table])


def tokenizer_file(tokenizer: Any | None) -> str | None:
    """Return the path of a transformers tokenizer's tokenizer.json, if it exists."""
    if tokenizer is None:
        return None
    file = Path(tokenizer.name_or_path or "", "tokenizer.json").absolute()
    return str(file) if file.is_file() else None


def _folder_of(rows: SplitRows, folder: Path) -> str:
    # A slice of a Dataset still refers to the files of the whole Dataset.
    if rows.folder is not None and len(open_rows(rows.folder)) == len(rows):
        return str(rows.folder.absolute())
    folder.mkdir(parents=True, exist_ok=True)
    table = rows.table
    with pa.OSFile(str(folder / "data.arrow"), "wb") as sink:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return str(folder.absolute())
