"""Recipes of token rows, keyed by everything that decides them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from flatout.engine.data.arrow_folder import without_indices
from flatout.engine.data.content_key import ContentKey, arrow_digest
from flatout.engine.settings import CLASSIFIES, ModelSettings, TokenizeSettings
from flatout.engine.tokenizing.encode import TokensError, TokensRecipe
from flatout.engine.tokenizing.plain_encoder import EncodeOptions
from flatout.engine.tokenizing.tokenizer import TokenizerFile

FORMAT_VERSION = 1
"""Raise it when the same input would give other token rows."""


def tokens_recipe(
    name: str,
    rows: Any,
    tokenizer: TokenizerFile,
    label_names: list[str],
    model: ModelSettings,
    tokenize: TokenizeSettings,
) -> TokensRecipe:
    """For the split `name`; `rows` is a `datasets.Dataset`. Raises TokensError."""
    _check_length(tokenizer, tokenize.max_length)
    rows = without_indices(rows)
    _check_labels(name, rows, model.task)
    options = _options(rows, tokenizer, model, tokenize)
    columns = [n for n in ("text", "text_pair", "label") if n in rows.column_names]
    fields = {
        "format": FORMAT_VERSION,
        "rows": arrow_digest([rows.data.table.select(columns)]),
        "tokenizer": tokenizer.digest,
        "label_names": label_names,
        **token_options(model, tokenize),
    }
    regression = model.task == "regression"
    return TokensRecipe(
        key=ContentKey(fields),
        rows=rows,
        name=name,
        tokenizer=tokenizer,
        options=options,
        label_names=None if regression else label_names,
        num_processes=tokenize.num_processes,
    )


def split_recipes(
    splits: Mapping[str, Any],
    tokenizer: TokenizerFile,
    label_names: list[str],
    model: ModelSettings,
    tokenize: TokenizeSettings,
) -> tuple[TokensRecipe, ...]:
    """For rows by split. Each key also names the rows of all, so that token rows of
    two different splits of the data are never taken for those of one."""
    recipes = [
        tokens_recipe(f"{name}_tokens", rows, tokenizer, label_names, model, tokenize)
        for name, rows in splits.items()
    ]
    whole = ContentKey({r.name: r.key.fields["rows"] for r in recipes}).digest
    keys = [ContentKey({**recipe.key.fields, "splits": whole}) for recipe in recipes]
    return tuple(replace(r, key=key) for r, key in zip(recipes, keys, strict=True))


def token_options(model: ModelSettings, tokenize: TokenizeSettings) -> dict[str, Any]:
    """Parameters that decide the token rows, by their path."""
    trained = model.name_or_path is None
    return {
        "model.task": model.task,
        "model.name_or_path": model.name_or_path,
        "model.revision": model.revision,
        "tokenize.max_length": tokenize.max_length,
        "tokenize.vocab_size": tokenize.vocab_size if trained else None,
        "tokenize.join_texts": tokenize.join_texts,
    }


def _options(
    rows: Any,
    tokenizer: TokenizerFile,
    model: ModelSettings,
    tokenize: TokenizeSettings,
) -> EncodeOptions:
    join = tokenize.join_texts
    if join and model.task not in ("causal-lm", "masked-lm"):
        raise TokensError(
            "tokenize.join_texts is for language models, and model.task is "
            f"{model.task}"
        )
    ends_alone = tokenizer.backend.num_special_tokens_to_add(False) > 0
    return EncodeOptions(
        max_length=tokenize.max_length,
        has_pair="text_pair" in rows.column_names,
        join=join,
        end_id=tokenizer.token_id("eos_token") if join and not ends_alone else None,
        empty_id=empty_text_id(tokenizer),
    )


def empty_text_id(tokenizer: TokenizerFile) -> int | None:
    """The id that stands for a text of which the tokenizer leaves no token."""
    names = ("unk_token", "eos_token", "sep_token", "bos_token")
    ids = (tokenizer.token_id(name) for name in names)
    return next((id_ for id_ in ids if id_ is not None), None)


def _check_labels(name: str, rows: Any, task: str) -> None:
    """split keeps class names as text, and the targets of regression as numbers."""
    if task not in CLASSIFIES or "label" not in rows.column_names:
        return
    kind = rows.data.table.column("label").type
    numbers = pa.types.is_floating(kind) or pa.types.is_integer(kind)
    if numbers != (task == "regression"):
        raise TokensError(
            f"{name}: the labels of its rows are "
            f"{'numbers' if numbers else 'class names'}, of no use for model.task "
            f"{task}: the rows were split for another task. Run kedro run "
            "--pipelines=split,tokenize, or set model.task back"
        )


def _check_length(tokenizer: TokenizerFile, max_length: int) -> None:
    limit = tokenizer.max_positions
    if limit is not None and max_length > limit:
        raise TokensError(
            f"tokenize.max_length is {max_length}, but the model takes rows of at most "
            f"{limit} tokens: set tokenize.max_length to {limit} or less, or a larger "
            "model.config.max_position_embeddings where it is trained from scratch"
        )
    added = tokenizer.backend.num_special_tokens_to_add(False)
    if max_length <= added:
        raise TokensError(
            f"tokenize.max_length is {max_length}, and the tokenizer adds {added} "
            "special tokens to each text: no token of the text would be left"
        )


def label_names_of(rows: Any) -> list[str]:
    """Distinct labels, sorted; as numbers where all of them are whole numbers."""
    if "label" not in rows.column_names:
        return []
    label = rows.data.table.column("label")
    if pa.types.is_floating(label.type):
        return []
    names = pc.unique(label).to_pylist()
    try:
        return sorted(names, key=int)
    except ValueError:
        return sorted(names)
