"""Check a saved model before prediction, and read its task, labels and limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flatout.engine.families import family_of
from flatout.engine.files.calibration import Calibration
from flatout.engine.files.content_key import file_hash
from flatout.engine.models.building import ModelError
from flatout.engine.parameters import ModelSettings, Settings, SettingsError
from flatout.engine.rows.vocabulary import Vocabulary
from flatout.engine.tasks import Calibrated, Task, make_task, task_of_model
from flatout.engine.tokenizing.token_keys import facts_of
from flatout.engine.tokenizing.tokenizer import TokenizerFile
from flatout.engine.tokenizing.tokenizer_checks import usable_positions


def task_of(
    model: Any, settings: ModelSettings, vocabulary: Vocabulary | None, seed: int = 0
) -> Task:
    """Return the task of a saved model, read from its config. `seed` is the training
    seed, which determines the masked tokens. Raises ModelError if the config has no
    task, or has a custom task that the settings do not name."""
    name, config = task_of_model(model), model.config
    if name is None:
        raise _no_row_answers_error(model)
    if "." in name and name != settings.task:
        raise ModelError(
            f"{_name(config)} was trained for the custom task {name}, and model.task "
            f"is {settings.task}: set model.task: {name}"
        )
    pooling = getattr(config, "flatout_pooling", settings.pooling)
    known = settings.model_copy(update={"task": name, "pooling": pooling})
    return make_task(known, label_names_of(config), vocabulary, seed)


def answering_task(
    model: Any, settings: ModelSettings, vocabulary: Vocabulary | None
) -> Task:
    """Return the same task as `task_of`, with its calibration. Raises ModelError if the
    task makes no predictions for whole rows."""
    task = with_calibration(task_of(model, settings, vocabulary), model)
    if not task.answer_fields():
        raise _no_row_answers_error(model)
    return task


def with_calibration(task: Task, model: Any) -> Task:
    """Load the calibration of `task` from the model's folder, and return `task`. Raises
    SettingsError if `model.label_threshold` is auto but no thresholds are stored."""
    if isinstance(task, Calibrated):
        task.calibration = Calibration.read(model.config.name_or_path)
        if task.settings.label_threshold == "auto" and not task.calibration.thresholds:
            raise SettingsError(
                f"model.label_threshold: auto, but {model.config.name_or_path} has no "
                "thresholds yet: run kedro run --pipelines=evaluate, or set a number"
            )
    return task


def vocabulary_of(tokenizer: TokenizerFile | None) -> Vocabulary | None:
    """Return the size and the special tokens of a saved tokenizer, which a task needs,
    or None if `tokenizer` is None."""
    if tokenizer is None:
        return None
    added = tokenizer.backend.get_added_tokens_decoder()
    return Vocabulary(
        size=tokenizer.backend.get_vocab_size(),
        pad_token_id=tokenizer.token_id("pad_token") or 0,
        mask_token_id=tokenizer.token_id("mask_token"),
        special_token_ids=tuple(sorted(n for n, one in added.items() if one.special)),
        unknown_token_id=tokenizer.token_id("unk_token"),
        start_token_id=tokenizer.token_id("bos_token"),
        end_token_id=tokenizer.token_id("eos_token"),
    )


def _no_row_answers_error(model: Any) -> ModelError:
    return ModelError(
        f"{_name(model.config)} is a {type(model).__name__}; predict needs a model "
        "with an answer for each row, such as a classifier or a regression. Use "
        "transformers for language models. Train such a model (model.task, then kedro "
        "run), or set its folder as filepath of the catalog entry model"
    )


def _name(config: Any) -> str:
    return str(config.name_or_path or "the model")


def label_names_of(config: Any) -> list[str]:
    """Return the class names in the order of the logits."""
    return [str(config.id2label[index]) for index in range(config.num_labels)]


def check_vocabulary(config: Any, tokenizer: TokenizerFile) -> None:
    """Raise ModelError if the tokenizer has more tokens than the model."""
    size = tokenizer.backend.get_vocab_size()
    if size > config.vocab_size:
        raise ModelError(
            f"the tokenizer in {tokenizer.folder} has {size} pieces, the model "
            f"{config.vocab_size}: they do not belong together. Let model and "
            "model_tokenizer of the catalog name the same folder"
        )


def shape_of(config: Any) -> tuple[int, ...]:
    """Return the shape of a model's samples. Raises ModelError if it reads tokens."""
    try:
        shape = family_of(config).samples.shape(config)
    except ValueError as error:
        raise ModelError(f"{_name(config)}: {error}") from error
    if shape is None:
        raise ModelError(
            f"{_name(config)} is a {config.model_type}, which reads texts: set the "
            "folder of a model for arrays or images as filepath of the catalog entry "
            "model"
        )
    return shape


def longest_row(
    config: Any, tokenizer: TokenizerFile | None, settings: Settings
) -> int:
    """Return the maximum length of a row in tokens, or 1 for samples. Raises
    SettingsError if `predict.max_length` exceeds the model's limit."""
    if tokenizer is None:
        return 1
    limits = [tokenizer.max_positions, usable_positions(config.to_dict())]
    usable = min((limit for limit in limits if limit is not None), default=None)
    wanted = settings.predict.max_length
    if wanted == "auto":
        longest = settings.tokenize.max_length
        return longest if usable is None else min(longest, usable)
    if usable is not None and wanted > usable:
        raise SettingsError(
            f"predict.max_length={wanted}, but the model accepts at most "
            f"{usable} tokens per row: set it to at most {usable}, or to auto"
        )
    return wanted


def check_tokens(tokens: Any, tokenizer: TokenizerFile | None) -> None:
    """Raise ModelError if the rows were tokenized with a different vocabulary. Rows
    without a stored vocabulary are not checked."""
    known = facts_of(tokens).get("vocabulary")
    if tokenizer and known and known != tokenizer.vocabulary_digest:
        raise ModelError(
            "the tokens were made with another tokenizer than the model's, for example "
            "one trained on other rows: train on them (kedro run), or set "
            f"model.name_or_path={tokenizer.folder} and run kedro run "
            "--pipelines=tokenize,evaluate"
        )


def model_file_hashes(config: Any) -> dict[str, str]:
    """Return the hash of each of a model's files, keyed by file name. If the model has
    no local files, return its commit, keyed by model name."""
    folder = Path(config.name_or_path or "")
    named = ("*.safetensors", "config.json", "adapter_config.json")
    files = sorted(file for name in named for file in folder.glob(name))
    if not config.name_or_path or not files:
        commit = getattr(config, "_commit_hash", None)
        return {str(config.name_or_path): str(commit)}
    return {path.name: file_hash(path) for path in files}
