"""What a saved model must be to predict, and what its config says of its rows."""

from __future__ import annotations

from typing import Any

from flatout.engine.building import ModelError
from flatout.engine.heads import position_offset
from flatout.engine.settings import Settings, SettingsError, Task
from flatout.engine.tokenizing.tokenizer import TokenizerFile


def task_of(model: Any) -> Task:
    """What a saved model answers. Raises ModelError where that is not one per row."""
    kind, config = type(model).__name__, model.config
    where = config.name_or_path or "the model"
    if not kind.endswith("ForSequenceClassification"):
        raise ModelError(
            f"{where} holds a {kind}; predict takes models of the tasks "
            "sequence-classification and regression. Train one (model.task in "
            "conf/base/parameters_model.yml, then kedro run), or let the entry model "
            "of the catalog name the folder of one"
        )
    if config.problem_type == "multi_label_classification":
        raise ModelError(
            f"{where} gives several labels to a row (multi_label_classification); "
            "predict gives one label or one number a row: choose another model"
        )
    return "regression" if config.num_labels == 1 else "sequence-classification"


def label_names_of(config: Any) -> list[str]:
    """Names of the classes in the order of the logits."""
    return [str(config.id2label[index]) for index in range(config.num_labels)]


def check_vocabulary(config: Any, tokenizer: TokenizerFile) -> None:
    """Raises ModelError where the tokenizer knows more pieces than the model."""
    size = tokenizer.backend.get_vocab_size()
    if size > config.vocab_size:
        raise ModelError(
            f"the tokenizer in {tokenizer.folder} has {size} pieces, the model "
            f"{config.vocab_size}: they do not belong together. Let model and "
            "model_tokenizer of the catalog name the same folder"
        )


def longest_row(config: Any, tokenizer: TokenizerFile, settings: Settings) -> int:
    """Tokens of a row. Raises SettingsError where the model takes fewer."""
    limits = [tokenizer.max_positions]
    if (positions := getattr(config, "max_position_embeddings", None)) is not None:
        limits.append(positions - position_offset(config))
    usable = min((limit for limit in limits if limit is not None), default=None)
    wanted = settings.predict.max_length
    if wanted == "auto":
        longest = settings.tokenize.max_length
        return longest if usable is None else min(longest, usable)
    if usable is not None and wanted > usable:
        raise SettingsError(
            f"predict.max_length={wanted}, but the model takes rows of at most "
            f"{usable} tokens: set it to at most {usable}, or to auto"
        )
    return wanted
