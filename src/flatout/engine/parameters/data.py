"""Rows and tokens: from raw text to what a model reads."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from flatout.engine.parameters.common import (
    EXECUTION,
    Auto,
    Count,
    SettingsModel,
    parameter,
)


class CorpusSettings(SettingsModel):
    """Size of the built-in corpus."""

    rows: int | None = Field(12_000, ge=10)
    """Number of docstrings; null: all there are."""
    labels: int = Field(10, ge=2, le=12)
    """Number of packages they come from."""


class Fractions(SettingsModel):
    """Shares of the rows; they add up to 1."""

    train: float = Field(0.8, gt=0, lt=1)
    """Share of the rows."""
    validation: float = Field(0.1, gt=0, lt=1)
    """Share of the rows; the best model is chosen by it."""
    test: float = Field(0.1, gt=0, lt=1)
    """Share of the rows; the three add up to 1."""

    @model_validator(mode="after")
    def _sum_to_one(self) -> Fractions:
        total = self.train + self.validation + self.test
        if abs(total - 1) > 1e-6:
            raise ValueError(f"train + validation + test must be 1, not {total:g}")
        return self


class SplitSettings(SettingsModel):
    """How raw rows are checked and dealt."""

    text_column: str = "text"
    """Column of the text."""
    text_pair_column: str | None = None
    """A second text, as in question and passage."""
    prompt_column: str | None = None
    """causal-lm: what comes before a completion, in place of `text_column`."""
    completion_column: str | None = None
    """causal-lm: what alone is learnt, behind the prompt."""
    messages_column: str | None = None
    """causal-lm: lists of messages; what the assistant writes is learnt."""
    anchor_column: str | None = None
    """embedding: texts that search, each beside the text that is to be found."""
    positive_column: str | None = None
    """embedding: the text that belongs to the anchor."""
    negative_column: str | None = None
    """embedding: a text, or a list of texts, that does not belong to the anchor."""
    label_column: str | None = "label"
    """null: unlabelled text, for language models."""
    label_columns: list[str] | None = None
    """multi-label-classification: columns of 0 and 1, a label each, in its place."""
    group_column: str | None = None
    """Rows of one group never part (a patient, a document)."""
    split_column: str | None = None
    """Names the split of each row: train, validation (val, dev, eval) or test."""
    on_leak: Literal["report", "drop"] = "report"
    """Of splits that are given: what to do with train's rows of the others' texts."""
    keep_duplicates: bool = False
    """Keep rows that repeat an earlier one, as sessions of a log do; a text may then
    be in two splits, unless its group is not."""
    fractions: Fractions = Fractions()
    max_rejected_fraction: float = Field(0.01, ge=0, le=1)
    """Stop when a larger share of the rows cannot be used."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Apart from `runtime.seed`: trainings with several seeds share one split."""

    @model_validator(mode="after")
    def _one_form(self) -> SplitSettings:
        if (self.prompt_column is None) != (self.completion_column is None):
            raise ValueError("prompt_column and completion_column go together")
        if (self.anchor_column is None) != (self.positive_column is None):
            raise ValueError("anchor_column and positive_column go together")
        if self.negative_column and not self.anchor_column:
            raise ValueError("negative_column needs anchor_column and positive_column")
        if self.completion_column and self.messages_column:
            raise ValueError(
                "messages_column is in place of prompt_column and completion_column"
            )
        return self


class TokenizeSettings(SettingsModel):
    """How texts become tokens."""

    max_length: int = Field(320, ge=2)
    """Tokens, special tokens included; longer texts are cut."""
    vocab_size: int = parameter(8_000, EXECUTION, ge=64)
    """Word pieces of a tokenizer trained here (`model.name_or_path: null`)."""
    join_texts: bool = parameter(False, EXECUTION)
    """Language models: lay texts end to end in blocks of `max_length`."""


class EvaluateSettings(SettingsModel):
    """Which predictions `evaluate` judges, and what it keeps of them."""

    split: Literal["train", "validation", "test"] = "test"
    """Rows that the saved model predicts."""
    wrong_rows: int = Field(100, ge=0)
    """Kept with their texts, those of the largest loss first."""


class ArraySettings(SettingsModel):
    """How files of numbers become samples of one shape (`train.rows: arrays`)."""

    path: str | None = None
    """A file or folder in place of the catalog's own; with --params alone."""
    inputs: list[str] = []
    """Columns of Parquet, or the array of .npz and HDF5. Empty: all but the label."""


class ImageSettings(SettingsModel):
    """How image files become pixels (`train.rows: images`)."""

    path: str | None = None
    """A folder or manifest in place of the catalog's own; with --params alone."""
    size: int = Field(224, ge=1)
    """Height and width: scaled so that the shorter side fits, the middle kept."""
    keep: Literal["pixels", "files"] = "pixels"
    """What rows hold. pixels: decoded once. files: their bytes, which take less disk
    where images are large, and are decoded at every epoch, by the loader's workers."""
    channels: Literal[1, 3] = 3
    """3: red, green, blue. 1: grey."""
    image_column: str = "image"
    """Of a manifest: paths of images, from its own folder."""


class DetectSettings(SettingsModel):
    """How `kedro run --env=deeplog --pipelines=detect` finds abnormal sessions."""

    top_keys: int = Field(9, ge=1)
    """A session is abnormal where a key is none of so many likeliest (the paper's
    g)."""
    min_end_probability: float = Field(1e-3, ge=0, lt=1)
    """A session is abnormal where its end is less probable. 0: ends are not judged."""
    label_column: str | None = "label"
    """Says of each session whether it is normal. null: nobody knows."""


class PredictSettings(SettingsModel):
    """How `kedro run --pipelines=predict` applies a saved model to texts."""

    text_column: str | None = None
    """null: `split.text_column`, or `text` of rows that split has made."""
    text_pair_column: str | None = None
    """null: that of split likewise, where the model was trained on pairs."""
    keep_text: bool = True
    """The texts beside their predictions."""
    id_column: str | None = None
    """Column that is carried over as `id`, as text."""
    max_length: Annotated[int, Field(ge=2)] | Auto = "auto"
    """Tokens of a row. auto: `tokenize.max_length`, or what the model takes if less."""
    strategy: Literal["grouped", "packed"] | Auto = "auto"
    """auto: packed on a GPU where it runs, else grouped."""
    token_budget: Count | Auto = "auto"
    """Most tokens, padding included, of one forward pass."""
    window_rows: int = Field(4_096, ge=1)
    """Rows that are held at a time, and sorted by length together."""
