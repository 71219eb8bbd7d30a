"""Parameters of rows and tokens, from raw text to the input of a model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from flatout.engine.parameters.common import (
    EXECUTION,
    MACHINE,
    Auto,
    Count,
    RowNumbers,
    SettingsModel,
    parameter,
)


class CorpusSettings(SettingsModel):
    """Size of the built-in corpus."""

    rows: int | None = Field(12_000, ge=10)
    """Number of docstrings; null: all available."""
    labels: int = Field(10, ge=2, le=12)
    """Number of packages that contain these docstrings."""


class Fractions(SettingsModel):
    """Shares of the rows; they add up to 1."""

    train: float = Field(0.8, gt=0, lt=1)
    """Share of the rows for training."""
    validation: float = Field(0.1, gt=0, lt=1)
    """Share of the rows for validation, by which the best model is chosen."""
    test: float = Field(0.1, gt=0, lt=1)
    """Share of the rows for the test; the three add up to 1."""

    @model_validator(mode="after")
    def _sum_to_one(self) -> Fractions:
        total = self.train + self.validation + self.test
        if abs(total - 1) > 1e-6:
            raise ValueError(f"train + validation + test must be 1, not {total:g}")
        return self


class SplitSettings(SettingsModel):
    """Checks of raw rows, and their distribution to splits."""

    text_column: str = "text"
    """Column of the text."""
    text_pair_column: str | None = None
    """Column of a second text, for example the passage of a question."""
    prompt_column: str | None = None
    """causal-lm: column of the text before a completion; replaces `text_column`."""
    completion_column: str | None = None
    """causal-lm: column of the text after the prompt; only this text is learned."""
    messages_column: str | None = None
    """causal-lm: column of lists of messages; the assistant's are learned."""
    anchor_column: str | None = None
    """embedding: column of query texts, each with the text that is to be found."""
    positive_column: str | None = None
    """embedding: column of the text that belongs to the anchor."""
    negative_column: str | None = None
    """embedding: column of texts, or lists of texts, that do not match the anchor."""
    query_column: str | None = None
    """reranking: column of queries; all rows of a query are in the same split."""
    passage_column: str | None = None
    """reranking: column of the passage to be ranked for the query."""
    label_column: str | None = "label"
    """Column of the label. null: unlabelled text, for language models."""
    label_columns: list[str] | None = None
    """multi-label-classification: columns of 0 and 1, one per label, used instead."""
    group_column: str | None = None
    """Column of a group (a patient, a document); its rows stay in one split."""
    split_column: str | None = None
    """Column of the split of each row: train, validation (val, dev, eval) or test."""
    on_leak: Literal["report", "drop"] = "report"
    """Treatment of train's rows whose texts are also in the other given splits."""
    keep_duplicates: bool = False
    """Keep rows that repeat an earlier one, such as sessions of a log; a text may then
    be in two splits, unless its rows are one group."""
    drop_rows: RowNumbers = []
    """Raw rows that are left out: their numbers, or suspect_rows.parquet of an audit,
    whose rows are found by their texts."""
    fractions: Fractions = Fractions()
    folds: int | None = Field(None, ge=2, le=100)
    """Number of folds for `kedro run --pipelines=crossvalidate`; each row is tested in
    one of them."""
    max_rejected_fraction: float = Field(0.01, ge=0, le=1)
    """Largest share of unusable rows; more stop the run."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the split; trainings with several `runtime.seed` share one split."""

    @model_validator(mode="after")
    def _one_form(self) -> SplitSettings:
        if (self.prompt_column is None) != (self.completion_column is None):
            raise ValueError("prompt_column and completion_column go together")
        if (self.anchor_column is None) != (self.positive_column is None):
            raise ValueError("anchor_column and positive_column go together")
        if (self.query_column is None) != (self.passage_column is None):
            raise ValueError("query_column and passage_column go together")
        if self.negative_column and not self.anchor_column:
            raise ValueError("negative_column needs anchor_column and positive_column")
        if self.completion_column and self.messages_column:
            raise ValueError(
                "set messages_column, or prompt_column and completion_column, not both"
            )
        return self


class TokenizeSettings(SettingsModel):
    """Conversion of texts to tokens."""

    max_length: int = Field(320, ge=2)
    """Maximum number of tokens, with special tokens; longer texts are cut."""
    vocab_size: int = parameter(8_000, EXECUTION, ge=64)
    """Number of word pieces of a tokenizer trained here (`name_or_path: null`)."""
    join_texts: bool = parameter(False, EXECUTION)
    """Language models: join texts end to end in blocks of `max_length`."""
    engine: Literal["local", "ray"] = parameter("local", EXECUTION, MACHINE)
    """Place of the work: all cores of this machine, or a Ray cluster (extra `ray`)."""
    mirror: str | None = parameter(None, EXECUTION, MACHINE)
    """URL (s3://bucket/tokens, or another of fsspec) for copies of the token rows. A
    machine without them downloads those with the same key. null: none."""


class EvaluateSettings(SettingsModel):
    """Predictions that `evaluate` makes, and those that it saves."""

    split: Literal["train", "validation", "test"] = "test"
    """Split that the saved model predicts."""
    wrong_rows: int = Field(100, ge=0)
    """Number of wrong rows saved with their texts, largest loss first."""
    calibrate: bool = False
    """Fit a temperature on validation, which makes probabilities agree with accuracy
    (Guo et al. 2017), and save it to the model's folder."""


class ArraySettings(SettingsModel):
    """Conversion of files of numbers to samples of one shape (`train.rows: arrays`)."""

    path: str | None = None
    """File or folder of the samples, instead of the catalog entry raw_arrays."""
    inputs: list[str] = []
    """Columns of Parquet, or the array of .npz and HDF5. Empty: all but the label."""


class ImageSettings(SettingsModel):
    """Conversion of image files to pixels (`train.rows: images`)."""

    path: str | None = None
    """Folder or manifest of the images, instead of the catalog entry raw_images."""
    size: int = Field(224, ge=1)
    """Height and width in pixels; the shorter side is scaled, the middle kept."""
    keep: Literal["pixels", "files"] = "pixels"
    """Content of rows. pixels: decoded once. files: encoded bytes, which use less disk
    for large images and are decoded in every epoch by the loader's workers."""
    channels: Literal[1, 3] = 3
    """Number of colour channels. 3: red, green, blue. 1: grey."""
    image_column: str = "image"
    """Column of a manifest with paths of images, relative to its own folder."""


class DetectSettings(SettingsModel):
    """Detection of abnormal sessions by `--env=deeplog --pipelines=detect`."""

    top_keys: int = Field(9, ge=1)
    """Number of likeliest keys (the paper's g): a session is abnormal if one of its
    keys is not among them."""
    min_end_probability: float = Field(1e-3, ge=0, lt=1)
    """Probability of an end below which a session is abnormal. 0: not evaluated."""
    label_column: str | None = "label"
    """Column that marks sessions as normal or abnormal. null: unknown."""


class MineSettings(SettingsModel):
    """Hard negatives of an embedding model, by `kedro run --pipelines=mine`."""

    negatives: int = Field(5, ge=1)
    """Number of negatives for each pair of an anchor and its positive."""
    top_k: int = Field(50, ge=1)
    """Number of the best passages of an anchor among which negatives are chosen."""
    margin: float = Field(0.05, ge=0, le=2)
    """Passages whose cosine is above that of the positive less the margin are likely
    positives, and are left out."""
    text_column: str = "text"
    """Column of the texts in `mine_corpus`; unused if these are rows from split."""
    folder: str = "data/07_model_output/mine_vectors"
    """Folder of the vectors, which a later run with the same model reads again."""

    @model_validator(mode="after")
    def _enough(self) -> MineSettings:
        if self.top_k < self.negatives:
            raise ValueError(f"top_k must be at least negatives, {self.negatives}")
        return self


class ExportSettings(SettingsModel):
    """Other formats of a saved model, by `kedro run --pipelines=export`."""

    formats: list[Literal["onnx", "onnx_int8", "torch_export", "compiled"]] = Field(
        ["onnx", "onnx_int8", "torch_export"], min_length=1
    )
    """Formats that are written, measured and compared. compiled needs minutes of
    compilation on few cores."""
    folder: str = "data/06_models/export"
    """Folder of the formats, one folder each."""


class PredictSettings(SettingsModel):
    """Application of a saved model to texts by `kedro run --pipelines=predict`."""

    text_column: str | None = None
    """Column of the text. null: `split.text_column`, or `text` of rows from split."""
    text_pair_column: str | None = None
    """Column of a second text. null: `split.text_pair_column`, if trained on pairs."""
    keep_text: bool = True
    """Save the texts next to their predictions."""
    id_column: str | None = None
    """Column that is copied to `id`, as text."""
    max_length: Annotated[int, Field(ge=2)] | Auto = "auto"
    """Maximum tokens of a row. auto: `tokenize.max_length`, or the model's if less."""
    strategy: Literal["grouped", "packed"] | Auto = "auto"
    """Batching. auto: packed on a GPU that supports it, else grouped."""
    token_budget: Count | Auto = "auto"
    """Maximum tokens, padding included, of one forward pass."""
    window_rows: int = Field(4_096, ge=1)
    """Number of rows in memory at a time, sorted by length together."""
    shard: str | None = Field(None, pattern="^[1-9][0-9]*/[1-9][0-9]*$")
    """i/n: predict only the i-th of n parts, into a file with the numbers in its name.
    null: all rows."""

    @field_validator("shard")
    @classmethod
    def _within(cls, given: str | None) -> str | None:
        if given is not None and int(given.split("/")[0]) > int(given.split("/")[1]):
            raise ValueError(f"{given}: the first number is at most the second")
        return given
