"""Parameters for rows and tokens, from the raw text to the input of a model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from flatout.engine.parameters.common import (
    EXECUTION,
    MACHINE,
    PATH,
    Auto,
    Count,
    RowNumbers,
    SettingsModel,
    parameter,
)


class CorpusSettings(SettingsModel):
    """Size of the built-in corpus."""

    rows: int | None = Field(12_000, ge=10)
    """Number of docstrings. If null, all available docstrings are used."""
    labels: int = Field(10, ge=2, le=12)
    """Number of packages from which the docstrings are taken."""


class Fractions(SettingsModel):
    """Fraction of the rows in each split. The fractions must add up to 1."""

    train: float = Field(0.8, gt=0, lt=1)
    """Fraction of the rows used for training."""
    validation: float = Field(0.1, gt=0, lt=1)
    """Fraction of the rows used for validation, which selects the best model."""
    test: float = Field(0.1, gt=0, lt=1)
    """Fraction of the rows used for testing. The fractions must add up to 1."""

    @model_validator(mode="after")
    def _sum_to_one(self) -> Fractions:
        total = self.train + self.validation + self.test
        if abs(total - 1) > 1e-6:
            raise ValueError(f"train + validation + test must be 1, not {total:g}")
        return self


class SplitSettings(SettingsModel):
    """Validation of raw rows and their assignment to splits."""

    text_column: str = "text"
    """Column that contains the text."""
    text_pair_column: str | None = None
    """Column that contains a second text, for example the passage for a question."""
    prompt_column: str | None = None
    """causal-lm: column of the text before a completion. Replaces `text_column`."""
    completion_column: str | None = None
    """causal-lm: column of the text after the prompt, which is the training target."""
    messages_column: str | None = None
    """causal-lm: column of message lists. The assistant's messages are the targets."""
    anchor_column: str | None = None
    """embedding: column of the query texts (anchors)."""
    positive_column: str | None = None
    """embedding: column of the text that matches the anchor."""
    negative_column: str | None = None
    """embedding: column of texts, or lists of texts, that do not match the anchor."""
    query_column: str | None = None
    """reranking: column of the queries. All rows of a query are in the same split."""
    passage_column: str | None = None
    """reranking: column of the passage to be ranked for the query."""
    label_column: str | None = "label"
    """Column of the label. Set it to null for unlabelled text (language models)."""
    label_columns: list[str] | None = None
    """multi-label-classification: columns of 0 and 1 that replace `label_column`."""
    group_column: str | None = None
    """Column that groups rows, for example by patient. All rows of a group are in the
    same split."""
    split_column: str | None = None
    """Column that names the split of each row: train, validation (val, dev, eval) or
    test."""
    on_leak: Literal["report", "drop"] = "report"
    """What to do with training rows whose text also occurs in another split, if the
    user provides the splits. `report` only reports them, and `drop` also drops them."""
    keep_duplicates: bool = False
    """Keep rows with the same text as an earlier row, which are common in logs. The
    same text can then be in two splits, unless all of its rows belong to one group."""
    drop_rows: RowNumbers = parameter([], PATH)
    """Raw rows to leave out, given as row numbers or as the file suspect_rows.parquet
    of an audit. Rows in this file are matched by their texts."""
    fractions: Fractions = Fractions()
    folds: int | None = Field(None, ge=2, le=100)
    """Number of folds for `kedro run --pipelines=crossvalidate`. Each row is a test row
    in exactly one fold."""
    max_rejected_fraction: float = Field(0.01, ge=0, le=1)
    """Maximum fraction of unusable rows. If there are more, the run stops."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the split. Runs with different `runtime.seed` use the same split."""

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
    """Maximum number of tokens per row, including special tokens. Longer texts are
    truncated."""
    vocab_size: int = parameter(8_000, EXECUTION, ge=64)
    """Vocabulary size of a tokenizer that flatout trains (`name_or_path: null`)."""
    join_texts: bool = parameter(False, EXECUTION)
    """Concatenate texts into blocks of `max_length` tokens (for language models)."""
    engine: Literal["local", "ray"] = parameter("local", EXECUTION, MACHINE)
    """Tokenize on all cores of this machine or on a Ray cluster (extra `ray`)."""
    mirror: str | None = parameter(None, EXECUTION, MACHINE)
    """URL to which token rows are copied, such as s3://bucket/tokens or any other URL
    that fsspec supports. A machine without token rows downloads the copy that has the
    same content key."""


class EvaluateSettings(SettingsModel):
    """Settings of the `evaluate` pipeline."""

    split: Literal["train", "validation", "test"] = "test"
    """Split on which the saved model is evaluated."""
    wrong_rows: int = Field(100, ge=0)
    """Number of wrong predictions to save with their texts. The ones with the largest
    losses are saved."""
    calibrate: bool = False
    """Fit a temperature on the validation split so that predicted probabilities match
    the accuracy (Guo et al. 2017), and save it in the model's folder."""


class ArraySettings(SettingsModel):
    """Conversion of numeric files to samples of one shape (`train.rows: arrays`)."""

    path: str | None = None
    """File or folder with the samples. It replaces the built-in digits in raw_arrays
    and predict_arrays."""
    inputs: list[str] = []
    """Input columns of Parquet files, or the input array of .npz and HDF5 files. If
    empty, all columns or arrays except the label are used."""


class ImageSettings(SettingsModel):
    """Conversion of image files to pixels (`train.rows: images`)."""

    path: str | None = None
    """Folder or manifest of the images. It replaces the built-in digits in raw_images
    and predict_images."""
    size: int = Field(224, ge=1)
    """Height and width in pixels. Images are resized, then centre-cropped."""
    keep: Literal["pixels", "files"] = "pixels"
    """`pixels` stores decoded images. `files` stores the encoded files, which need less
    disk space for large images. The loader workers decode them in every epoch."""
    channels: Literal[1, 3] = 3
    """Number of colour channels: 3 for red, green and blue, or 1 for greyscale."""
    image_column: str = "image"
    """Column of a manifest with the image paths, relative to the manifest's folder."""


class DetectSettings(SettingsModel):
    """Detection of abnormal sessions (`kedro run --env=deeplog --pipelines=detect`)."""

    top_keys: int = Field(9, ge=1)
    """Number of most likely keys (g in the DeepLog paper). A session is abnormal if one
    of its keys is not among the most likely keys at its position."""
    min_end_probability: float = Field(1e-3, ge=0, lt=1)
    """Minimum predicted probability that a normal session ends where it does. 0
    disables this check."""
    label_column: str | None = "label"
    """Column that marks sessions as normal or abnormal, or null if there is none."""


class MineSettings(SettingsModel):
    """Search for hard negatives with `kedro run --pipelines=mine`."""

    negatives: int = Field(5, ge=1)
    """Number of negatives for each pair of an anchor and its positive."""
    top_k: int = Field(50, ge=1)
    """Number of best-scoring passages per anchor from which negatives are chosen."""
    margin: float = Field(0.05, ge=0, le=2)
    """A passage is left out if its cosine similarity to the anchor exceeds the
    positive's similarity minus this margin, because it is probably another positive."""
    text_column: str = "text"
    """Column of the texts in `mine_corpus`. Ignored if the corpus comes from the
    `split` pipeline."""
    folder: str = parameter("data/07_model_output/mine_vectors", PATH)
    """Folder for the vectors. Later runs with the same model reuse the vectors."""

    @model_validator(mode="after")
    def _enough(self) -> MineSettings:
        if self.top_k < self.negatives:
            raise ValueError(f"top_k must be at least negatives, {self.negatives}")
        return self


class ExportSettings(SettingsModel):
    """Export of a saved model to other formats by `kedro run --pipelines=export`."""

    formats: list[Literal["onnx", "onnx_int8", "torch_export", "compiled"]] = Field(
        ["onnx", "onnx_int8", "torch_export"], min_length=1
    )
    """Formats to export, measure and compare. `compiled` can take minutes to
    compile."""
    folder: str = parameter("data/06_models/export", PATH)
    """Folder that contains one subfolder for each format."""


class PredictSettings(SettingsModel):
    """Prediction with a saved model by `kedro run --pipelines=predict`."""

    text_column: str | None = None
    """Column of the text. If null, it is `split.text_column`, or `text` for rows
    written by the `split` pipeline."""
    text_pair_column: str | None = None
    """Column of a second text. If null, it is `split.text_pair_column` if the model was
    trained on pairs."""
    keep_text: bool = True
    """Save the texts alongside their predictions."""
    id_column: str | None = None
    """Column that is copied as text to the output column `id`."""
    max_length: Annotated[int, Field(ge=2)] | Auto = "auto"
    """Maximum number of tokens per row. `auto` is `tokenize.max_length`, or the model's
    maximum if that is smaller."""
    strategy: Literal["grouped", "packed"] | Auto = "auto"
    """Batching method. `auto` uses `packed` if a GPU supports it, or else `grouped`."""
    token_budget: Count | Auto = "auto"
    """Maximum number of tokens in one forward pass, including padding."""
    window_rows: int = Field(4_096, ge=1)
    """Number of rows that are read into memory and sorted by length at a time."""
    shard: str | None = Field(None, pattern="^[1-9][0-9]*/[1-9][0-9]*$")
    """Part of the rows to predict, as i/n for the i-th of n parts. The name of the
    predictions file contains these numbers. If null, all rows are predicted."""

    @field_validator("shard")
    @classmethod
    def _within(cls, given: str | None) -> str | None:
        if given is not None and int(given.split("/")[0]) > int(given.split("/")[1]):
            raise ValueError(f"{given}: the first number is at most the second")
        return given
