"""Recipes of token rows. Their content keys cover everything that affects tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from flatout.engine.data.column_checks import is_text
from flatout.engine.data.labels import ordered_names
from flatout.engine.files.arrow_folder import without_indices
from flatout.engine.files.content_key import ContentKey, arrow_digest
from flatout.engine.parameters import ModelSettings, TokenizeSettings
from flatout.engine.rows.vocabulary import first_given
from flatout.engine.tasks import Task, make_task
from flatout.engine.tokenizing.encoders.encode import TEXTS, WRITTEN, TokensRecipe
from flatout.engine.tokenizing.encoders.encoded import PASSAGES, TokensError
from flatout.engine.tokenizing.encoders.encoder import EncodeOptions, special_around
from flatout.engine.tokenizing.tokenizer import TokenizerFile

COLUMNS = (*TEXTS, PASSAGES, "label")
"""Columns of rows that affect their tokens."""
FORMAT_VERSION = 1
"""Increase this whenever the same input would give different token rows."""


def tokens_recipe(
    name: str,
    rows: Any,
    tokenizer: TokenizerFile,
    label_names: list[str],
    model: ModelSettings,
    tokenize: TokenizeSettings,
) -> TokensRecipe:
    """Return the recipe of the token rows `name`. `rows` is the `datasets.Dataset` of
    texts to encode. Raises TokensError if the rows or the tokenizer do not fit the
    parameters."""
    _check_length(tokenizer, tokenize.max_length)
    rows = without_indices(rows)
    task = make_task(model, label_names)
    form = next((n for n in WRITTEN if n in rows.column_names), task.texts.form)
    _check_fits(name, rows, task, form)
    options = _options(rows, tokenizer, task, tokenize, form)
    columns = [n for n in COLUMNS if n in rows.column_names]
    fields = {
        "format": FORMAT_VERSION,
        "rows": arrow_digest([rows.data.table.select(columns)]),
        "tokenizer": tokenizer.digest,
        "label_names": label_names,
        **token_options(model, tokenize),
    }
    if options.whole_ends and ends_texts(tokenizer):
        fields["whole_ends"] = True  # absent if truncated rows have an end token
    starts = tokenizer.backend.num_special_tokens_to_add(False) > 0
    if options.form == "completion" and starts and options.end_id is not None:
        # Earlier versions added no end token here, so their keys lack this field.
        fields["end_id"] = options.end_id
    if options.form == "messages":
        fields["chat_template"] = tokenizer.chat_template
    return TokensRecipe(
        key=ContentKey(fields),
        rows=rows,
        name=name,
        tokenizer=tokenizer,
        options=options,
        task=task,
        mirror=tokenize.mirror,
        engine=tokenize.engine,
    )


def split_recipes(
    splits: Mapping[str, Any],
    tokenizer: TokenizerFile,
    label_names: list[str],
    model: ModelSettings,
    tokenize: TokenizeSettings,
) -> tuple[TokensRecipe, ...]:
    """Return a recipe for each split. The key of each recipe also depends on the rows
    of all other splits, so that token rows of different data are never combined."""
    recipes = [
        tokens_recipe(f"{name}_tokens", rows, tokenizer, label_names, model, tokenize)
        for name, rows in splits.items()
    ]
    whole = ContentKey({r.name: r.key.fields["rows"] for r in recipes}).digest
    keys = [ContentKey({**recipe.key.fields, "splits": whole}) for recipe in recipes]
    return tuple(replace(r, key=key) for r, key in zip(recipes, keys, strict=True))


def token_options(model: ModelSettings, tokenize: TokenizeSettings) -> dict[str, Any]:
    """Return the values of all parameters that affect token rows, by parameter path."""
    trained = model.name_or_path is None
    return {
        "model.task": model.task,
        "model.name_or_path": model.name_or_path,
        "model.revision": model.revision,
        "tokenize.max_length": tokenize.max_length,
        "tokenize.vocab_size": tokenize.vocab_size if trained else None,
        "tokenize.join_texts": tokenize.join_texts,
    }


def _check_fits(name: str, rows: Any, task: Task, form: str) -> None:
    """Raise TokensError if the rows were split for another task."""
    columns = rows.column_names
    fits = (form == "pairs") == (PASSAGES in columns)
    fits &= form != "ranking" or "text_pair" in columns
    fits &= form not in WRITTEN or task.texts.completions
    if task.label_type is not None and "label" in columns:
        label = rows.data.table.column("label").type
        fits &= _kind(label) == _kind(task.label_type)
    if not fits:
        raise TokensError(
            f"{name}: the rows were split for another task than {task.settings.task}. "
            "Run kedro run --pipelines=split,tokenize, or set model.task back"
        )


def _kind(label: Any) -> tuple[bool, bool]:
    """Return whether an Arrow label type is a list type, and whether it is numeric."""
    is_list = pa.types.is_list(label) or pa.types.is_large_list(label)
    inner = label.value_type if is_list else label
    return is_list, pa.types.is_floating(inner) or pa.types.is_integer(inner)


def _options(
    rows: Any,
    tokenizer: TokenizerFile,
    task: Task,
    tokenize: TokenizeSettings,
    form: str,
) -> EncodeOptions:
    join = tokenize.join_texts
    second = form if form in WRITTEN else "text_pair"
    if join and second in rows.column_names:
        raise TokensError(
            "tokenize.join_texts is for whole texts, and the rows were split with "
            f"split.{second}_column: set one of them to false or null"
        )
    if join and not task.texts.joined:
        raise TokensError(
            "tokenize.join_texts is for language models, and model.task is "
            f"{task.settings.task}"
        )
    lacks_end = join and tokenizer.backend.num_special_tokens_to_add(False) == 0
    if form == "completion":  # A tokenizer may add only a start token, as Llama's does.
        lacks_end = not ends_texts(tokenizer)
        unknown = special_around(tokenizer.backend) is None
        if lacks_end and (unknown or tokenizer.token_id("eos_token") is None):
            raise TokensError(
                "the tokenizer adds no token after a text and has no end token: a "
                "model could never learn to stop. Give it an eos_token in "
                "tokenizer_config.json"
            )
    return EncodeOptions(
        max_length=tokenize.max_length,
        has_pair="text_pair" in rows.column_names,
        join=join,
        form=form,
        end_id=tokenizer.token_id("eos_token") if lacks_end else None,
        empty_id=empty_text_id(tokenizer),
        whole_ends=task.texts.predicts_neighbours,
    )


def ends_texts(tokenizer: TokenizerFile) -> bool:
    """Return whether the tokenizer adds a special token after a text."""
    _, after = special_around(tokenizer.backend) or ([], [])
    return bool(after)


def empty_text_id(tokenizer: TokenizerFile) -> int | None:
    """Return the id of the token that represents a text without any tokens, or None if
    the tokenizer has no suitable token."""
    names = ("unk_token", "eos_token", "sep_token", "bos_token")
    return first_given(*map(tokenizer.token_id, names))


def _check_length(tokenizer: TokenizerFile, max_length: int) -> None:
    limit = tokenizer.max_positions
    if limit is not None and max_length > limit:
        raise TokensError(
            f"tokenize.max_length is {max_length}, but the model accepts at most "
            f"{limit} tokens per row: set tokenize.max_length to {limit} or less, or, "
            "for a model from scratch, a larger model.config.max_position_embeddings"
        )
    added = tokenizer.backend.num_special_tokens_to_add(False)
    if max_length <= added:
        raise TokensError(
            f"tokenize.max_length is {max_length}, and the tokenizer adds {added} "
            "special tokens to each text: no token of the text would be left"
        )


def label_names_of(rows: Any) -> list[str]:
    """Return the distinct label names of a `datasets.Dataset`, in order, or an empty
    list if there are no labels or they are numbers."""
    if "label" not in rows.column_names:
        return []
    label = rows.data.table.column("label")
    if pa.types.is_list(label.type) or pa.types.is_large_list(label.type):
        label = pc.list_flatten(label)
    return ordered_names(pc.unique(label).to_pylist()) if is_text(label.type) else []
