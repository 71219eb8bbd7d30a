"""Nodes of the tokenize pipeline. They return recipes: objects that compute a result
while it is saved, unless the stored result is up to date."""

from __future__ import annotations

from typing import Any

from flatout.engine.data.raw_texts import SPLITS
from flatout.engine.parameters import ModelSettings, TokenizeSettings
from flatout.engine.tokenizing.encoders.encode import TokensRecipe
from flatout.engine.tokenizing.statistics import token_report
from flatout.engine.tokenizing.token_recipes import split_recipes
from flatout.engine.tokenizing.tokenizer import (
    TokenizerFile,
    TokenizerRecipe,
)


def make_tokenizer(
    train_rows: Any, model: ModelSettings, tokenize: TokenizeSettings
) -> tuple[TokenizerRecipe, TokenizerRecipe]:
    """Return a recipe that loads the checkpoint's tokenizer or trains one on
    `train_rows`. The recipe is returned twice, for the two catalog entries that share
    the tokenizer's folder."""
    recipe = TokenizerRecipe(train_rows, model, tokenize)
    return recipe, recipe


def encode_rows(
    train_rows: Any,
    validation_rows: Any,
    test_rows: Any,
    tokenizer_file: TokenizerFile,
    label_names: list[str],
    model: ModelSettings,
    tokenize: TokenizeSettings,
) -> tuple[TokensRecipe, ...]:
    """Return recipes that tokenize the rows of the three splits, in the same order."""
    splits = dict(zip(SPLITS, (train_rows, validation_rows, test_rows), strict=True))
    return split_recipes(splits, tokenizer_file, label_names, model, tokenize)


def describe_tokens(
    train_tokens: Any, validation_tokens: Any, test_tokens: Any, max_length: int
) -> tuple[dict[str, Any], Any]:
    """Return a report and a Plotly figure of token lengths and truncation."""
    from flatout.reports.pictures import length_figure

    tokens = (train_tokens, validation_tokens, test_tokens)
    report = token_report(dict(zip(SPLITS, tokens, strict=True)), max_length)
    return report, length_figure(report)
