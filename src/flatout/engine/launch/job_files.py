"""Serialise a training job to paths and JSON values that new processes can read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from flatout.engine.files.content_key import arrow_digest
from flatout.engine.files.keyed_folder import stored_key
from flatout.engine.parameters import Settings
from flatout.engine.rows import row_kind
from flatout.engine.rows.rows import SplitRows, open_rows
from flatout.engine.rows.vocabulary import Vocabulary
from flatout.engine.train.setup.job import TrainJob


@dataclass(frozen=True)
class JobFiles:
    """The folders of the rows, and information about the tokenizer and the labels."""

    splits: Mapping[str, str]
    """The folders of the splits train, validation and test."""
    vocabulary: Mapping[str, Any] | None
    label_names: tuple[str, ...]
    data_key: str
    """The content key of the rows."""
    tokenizer_file: str | None = None

    @classmethod
    def of(cls, job: TrainJob, folder: Path, data_key: str | None = None) -> JobFiles:
        """Describe `job`. Rows that have no folder yet are written to `folder`.
        `data_key` defaults to the job's key."""
        for rows in job.splits.values():
            _ = rows.facts  # computed once here, instead of in each rank
        return cls(
            splits=folders_of(job.splits, folder),
            vocabulary=asdict(job.vocabulary) if job.vocabulary else None,
            label_names=job.label_names,
            data_key=data_key or job.data_key,
            tokenizer_file=job.tokenizer_file,
        )

    def open(self, settings: Settings, work_folder: Path) -> TrainJob:
        row_kind(settings.train.rows)  # registers a custom class
        vocabulary = None
        if stored := self.vocabulary:  # JSON stores tuples as lists
            special = tuple(stored["special_token_ids"])
            vocabulary = Vocabulary(**{**stored, "special_token_ids": special})
        return TrainJob(
            settings=settings,
            **{name: open_rows(Path(place)) for name, place in self.splits.items()},
            vocabulary=vocabulary,
            label_names=tuple(self.label_names),
            work_folder=work_folder,
            metrics_file=work_folder / "metrics.jsonl",
            data_key=self.data_key,
            tokenizer_file=self.tokenizer_file,
        )


def token_key(rows: SplitRows) -> str:
    """Return the digest of the stored content key, or else of the rows themselves."""
    stored = stored_key(rows.folder) if rows.folder else None
    return stored.digest if stored else arrow_digest([rows.table])


def tokenizer_file(tokenizer: Any | None) -> str | None:
    """Return the path of a transformers tokenizer's tokenizer.json, if it exists."""
    if tokenizer is None:
        return None
    file = Path(tokenizer.name_or_path or "", "tokenizer.json").absolute()
    return str(file) if file.is_file() else None


def folders_of(splits: Mapping[str, SplitRows], folder: Path) -> dict[str, str]:
    """Return each split's folder, which is written below `folder` if there is none."""
    return {name: _folder_of(rows, folder / name) for name, rows in splits.items()}


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
