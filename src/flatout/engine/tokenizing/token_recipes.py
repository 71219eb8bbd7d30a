"""Recipes of token rows, with keys of all data and options that determine them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from flatout.engine.files.arrow_folder import without_indices
from flatout.engine.files.content_key import ContentKey, arrow_digest
from flatout.engine.parameters import ModelSettings, TokenizeSettings
from flatout.engine.tasks import Task, make_task
from flatout.engine.tokenizing.encoders.encode import WRITTEN, TokensRecipe
from flatout.engine.tokenizing.encoders.encoded import PASSAGES, TokensError
from flatout.engine.tokenizing.encoders.encoder import EncodeOptions, special_around
from flatout.engine.tokenizing.tokenizer import TokenizerFile

COLUMNS = ("text", "text_pair", "completion", "messages", PASSAGES, "label")
"""Columns of rows that determine their tokens."""
FORMAT_VERSION = 1
"""Increase it if the same input would give other token rows."""


def tokens_recipe(
    name: str,
    rows: Any,
    tokenizer: TokenizerFile,
    label_names: list[str],
    model: ModelSettings,
    tokenize: TokenizeSettings,
) -> TokensRecipe:
    """Recipe of split `name`; `rows` is a `datasets.Dataset`. Raises TokensError."""
    _check_length(tokenizer, tokenize.max_length)
    rows = without_indices(rows)
    task = make_task(model, label_names)
    _check_labels(name, rows, task, model.task)
    options = _options(rows, tokenizer, task, tokenize)
    columns = [n for n in COLUMNS if n in rows.column_names]
    fields = {
        "format": FORMAT_VERSION,
        "rows": arrow_digest([rows.data.table.select(columns)]),
        "tokenizer": tokenizer.digest,
        "label_names": label_names,
        **token_options(model, tokenize),
    }
    if options.whole_ends and ends_texts(tokenizer):
        fields["whole_ends"] = True  # older keys: truncated rows with ends
    starts = tokenizer.backend.num_special_tokens_to_add(False) > 0
    if options.form == "completion" and starts and options.end_id is not None:
        fields["end_id"] = options.end_id  # older keys: no end behind a start token
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
    """Return the recipes by split. Each key also contains the rows of all splits, so
    that token rows of two different splits of the data are never combined."""
    recipes = [
        tokens_recipe(f"{name}_tokens", rows, tokenizer, label_names, model, tokenize)
        for name, rows in splits.items()
    ]
    whole = ContentKey({r.name: r.key.fields["rows"] for r in recipes}).digest
    keys = [ContentKey({**recipe.key.fields, "splits": whole}) for recipe in recipes]
    return tuple(replace(r, key=key) for r, key in zip(recipes, keys, strict=True))


def token_options(model: ModelSettings, tokenize: TokenizeSettings) -> dict[str, Any]:
    """Return the parameters that determine the token rows, by their path."""
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
    task: Task,
    tokenize: TokenizeSettings,
) -> EncodeOptions:
    join = tokenize.join_texts
    own = (name for name in WRITTEN if name in rows.column_names)
    form = next(own, task.texts.form)
    has_pair = "text_pair" in rows.column_names
    fits = (form == "pairs") == (PASSAGES in rows.column_names)
    if not fits or (form == "ranking" and not has_pair):
        raise TokensError(
            f"the rows were split for another task than {task.settings.task}: run "
            "kedro run --pipelines=split,tokenize, or set model.task back"
        )
    if form in WRITTEN:
        _check_written(form, tokenizer, task, join=join)
    if join and not task.texts.joined:
        raise TokensError(
            "tokenize.join_texts is for language models, and model.task is "
            f"{task.settings.task}"
        )
    lacks_end = join and tokenizer.backend.num_special_tokens_to_add(False) == 0
    if form == "completion":  # a start token, as Llama's, is no end
        lacks_end = not ends_texts(tokenizer)
    return EncodeOptions(
        max_length=tokenize.max_length,
        has_pair=has_pair,
        join=join,
        form=form,
        end_id=tokenizer.token_id("eos_token") if lacks_end else None,
        empty_id=empty_text_id(tokenizer),
        whole_ends=task.texts.predicts_neighbours,
    )


def _check_written(
    form: str, tokenizer: TokenizerFile, task: Task, *, join: bool
) -> None:
    """Raise TokensError if a part of the rows, or its end, cannot be learned."""
    if not task.texts.completions:
        raise TokensError(
            f"the rows were split with split.{form}_column, and model.task is "
            f"{task.settings.task}: run kedro run --pipelines=split,tokenize, or set "
            "model.task back"
        )
    if join:
        raise TokensError(
            f"tokenize.join_texts is for whole texts, and the rows were split with "
            f"split.{form}_column: set it to false"
        )
    if form == "completion" and not ends_texts(tokenizer):
        unknown = special_around(tokenizer.backend) is None
        if unknown or tokenizer.token_id("eos_token") is None:
            raise TokensError(
                "the tokenizer adds no token after a text and has no end token: a "
                "model could never learn to stop. Give it an eos_token in "
                "tokenizer_config.json"
            )


def ends_texts(tokenizer: TokenizerFile) -> bool:
    """Return true if the tokenizer adds a token after a text."""
    _, after = special_around(tokenizer.backend) or ([], [])
    return bool(after)


def empty_text_id(tokenizer: TokenizerFile) -> int | None:
    """Return the id for a text of which the tokenizer leaves no token."""
    names = ("unk_token", "eos_token", "sep_token", "bos_token")
    ids = (tokenizer.token_id(name) for name in names)
    return next((id_ for id_ in ids if id_ is not None), None)


def _check_labels(name: str, rows: Any, task: Task, task_name: str) -> None:
    """Check the label type: class names are texts, regression targets are numbers."""
    if task.label_type is None or "label" not in rows.column_names:
        return
    kind = rows.data.table.column("label").type
    if _kind(kind) != _kind(task.label_type):
        raise TokensError(
            f"{name}: the labels of its rows are {_kind(kind)}, of no use for "
            f"model.task {task_name}: the rows were split for another task. Run kedro "
            "run --pipelines=split,tokenize, or set model.task back"
        )


def _kind(label: Any) -> str:
    """Name of an Arrow label type for messages."""
    if pa.types.is_list(label) or pa.types.is_large_list(label):
        return f"lists of {_kind(label.value_type)}"
    numbers = pa.types.is_floating(label) or pa.types.is_integer(label)
    return "numbers" if numbers else "class names"


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
    """Distinct labels, sorted; in numeric order if all are whole numbers."""
    if "label" not in rows.column_names:
        return []
    label = rows.data.table.column("label")
    if pa.types.is_list(label.type) or pa.types.is_large_list(label.type):
        label = pc.list_flatten(label)
    # Tables that pandas wrote have large strings.
    if not (pa.types.is_string(label.type) or pa.types.is_large_string(label.type)):
        return []
    names = pc.unique(label).to_pylist()
    try:
        return sorted(names, key=int)
    except ValueError:
        return sorted(names)
