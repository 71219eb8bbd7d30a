"""Rows and tokens: from raw text to what a model reads."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from flatout.engine.settings.common import Auto, Count, SettingsModel


class CorpusSettings(SettingsModel):
    """The built-in corpus, where a run asks for another size of it."""

    rows: int | None = Field(None, ge=10)
    labels: int | None = Field(None, ge=2)


class Fractions(SettingsModel):
    train: float = Field(0.8, gt=0, lt=1)
    validation: float = Field(0.1, gt=0, lt=1)
    test: float = Field(0.1, gt=0, lt=1)

    @model_validator(mode="after")
    def _sum_to_one(self) -> Fractions:
        total = self.train + self.validation + self.test
        if abs(total - 1) > 1e-6:
            raise ValueError(f"train + validation + test must be 1, not {total:g}")
        return self


class SplitSettings(SettingsModel):
    text_column: str = "text"
    text_pair_column: str | None = None
    label_column: str | None = "label"
    """null: unlabelled text, for language models."""
    group_column: str | None = None
    """Rows of one group never part (a patient, a document)."""
    fractions: Fractions = Fractions()
    max_rejected_fraction: float = Field(0.01, ge=0, le=1)
    """Stop when a larger share of the rows cannot be used."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Apart from `runtime.seed`: trainings with several seeds share one split."""


class TokenizeSettings(SettingsModel):
    max_length: int = Field(320, ge=2)
    """Tokens, special tokens included; longer texts are cut."""
    vocab_size: int = Field(8_000, ge=64)
    """Word pieces of a tokenizer trained here (`model.name_or_path: null`)."""
    num_processes: Count | Auto = "auto"
    join_texts: bool = False
    """Language models: lay texts end to end in blocks of `max_length`."""


class PredictSettings(SettingsModel):
    """How a saved model is applied to texts."""

    text_column: str = "text"
    text_pair_column: str | None = None
    id_column: str | None = None
    """Column that is carried over as `id`, as text."""
    max_length: Annotated[int, Field(ge=2)] | Auto = "auto"
    """Tokens of a row. auto: `tokenize.max_length`, or what the model takes if less."""
    strategy: Literal["grouped", "packed"] | Auto = "auto"
    token_budget: Count | Auto = "auto"
    """Most tokens, padding included, of one forward pass."""
    window_rows: int = Field(4_096, ge=1)
    """Rows that are held at a time, and sorted by length together."""
