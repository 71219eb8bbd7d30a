"""Load a checkpoint's tokenizer or train a new one, and prepare it for training."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from flatout.engine.files.arrow_folder import without_indices
from flatout.engine.files.content_key import ContentKey, arrow_digest
from flatout.engine.machine.hub import answers, where_to_look
from flatout.engine.parameters import ModelSettings, TokenizeSettings
from flatout.engine.parameters.faults import first_line
from flatout.engine.tasks import task_class
from flatout.engine.tokenizing import byte_pieces, word_pieces
from flatout.engine.tokenizing.tokenizer_checks import (
    TokenizerError,
    files_digest,
    make_usable,
    usable_positions,
)

logger = logging.getLogger(__name__)

FILES = ("tokenizer.json", "tokenizer_config.json")
FORMAT_VERSION = 2
ENDS_TEXTS = "flatout_ends_texts"
"""Config key of a saved tokenizer that adds no end token, because a prompt must not end
with one. If the key is set, flatout itself adds an end token to training texts."""
NO_LIMIT = int(1e30)
"""The `model_max_length` that transformers writes for models without a maximum."""


@dataclass(frozen=True)
class TokenizerFile:
    """A saved tokenizer that is read without importing transformers or torch."""

    folder: Path

    @cached_property
    def digest(self) -> str:
        """Hash of the files that determine how texts are encoded."""
        state = xxhash.xxh3_128()
        for name in FILES:
            state.update(self._read(name))
        return str(state.hexdigest())

    @cached_property
    def config(self) -> dict[str, Any]:
        return json.loads(self._read("tokenizer_config.json"))

    @property
    def max_positions(self) -> int | None:
        """Maximum number of tokens per row, or None if the model has no maximum."""
        limit = int(self.config.get("model_max_length") or NO_LIMIT)
        return limit if limit < NO_LIMIT else None

    @property
    def gives_type_ids(self) -> bool:
        """Return whether transformers returns `token_type_ids` for a pair of texts."""
        names = self.config.get("model_input_names")
        if names is None:
            import transformers

            generic = transformers.PreTrainedTokenizerFast
            kind = getattr(
                transformers, self.config.get("tokenizer_class", ""), generic
            )
            names = kind.model_input_names
        return "token_type_ids" in names

    @property
    def chat_template(self) -> str | None:
        """The chat template, or None if there is none."""
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text("utf-8")
        return self.config.get("chat_template")

    @cached_property
    def backend(self) -> Any:
        """A `tokenizers.Tokenizer` that neither truncates nor pads. If the config
        contains ENDS_TEXTS, it adds an end token to each text."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_buffer(self._read("tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        if self.config.get(ENDS_TEXTS):
            tokenizer.post_processor = byte_pieces.around(tokenizer, end=True)
        return tokenizer

    @cached_property
    def vocabulary_digest(self) -> str:
        """Hash of the tokens and their ids, independent of the file format."""
        state = xxhash.xxh3_128()
        for piece, number in sorted(self.backend.get_vocab().items()):
            state.update(f"{number} {piece}\n".encode())
        return str(state.hexdigest())

    def token_id(self, name: str) -> int | None:
        """Return the id of the special token `name`, such as `eos_token`, or None if
        the tokenizer has no such token."""
        token = self.config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        return None if text is None else self.backend.token_to_id(text)

    def _read(self, name: str) -> bytes:
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            raise TokenizerError(
                f"{self.folder / name} cannot be read ({error.strerror}): run the "
                "tokenize pipeline"
            ) from error


@dataclass(frozen=True)
class TokenizerRecipe:
    """Recipe of the tokenizer, which is trained if `model.name_or_path` is None."""

    rows: Any
    """The `datasets.Dataset` of texts on which a tokenizer is trained."""
    model: ModelSettings
    tokenize: TokenizeSettings

    @cached_property
    def key(self) -> ContentKey:
        """The content key, which contains all inputs that determine the tokenizer."""
        model = self.model
        fields = {"format": FORMAT_VERSION, "task": model.task}
        if model.name_or_path is None:
            import tokenizers

            made = byte_pieces if _writes(model) else word_pieces
            fields |= {
                "rows": arrow_digest([self._columns]),
                "vocab_size": self.tokenize.vocab_size,
                "tokenizers": tokenizers.__version__,
                "training": made.FORMAT_VERSION,
            }
        else:
            fields |= {
                "name_or_path": model.name_or_path,
                "revision": model.revision,
                "files": files_digest(model.name_or_path, model.revision),
            }
        return ContentKey({**fields, "positions": _scratch_config(model)})

    @property
    def _columns(self) -> Any:
        rows = without_indices(self.rows)
        names = ("text", "text_pair", "completion", "passages")
        return rows.data.table.select([n for n in names if n in rows.column_names])

    def write(self, folder: Path) -> dict[str, Any]:
        """Save the tokenizer to `folder`. Return {}, because it has no statistics."""
        self.build().save_pretrained(folder)
        return {}

    def build(self) -> Any:
        """Load or train a `PreTrainedTokenizerFast`. Raises TokenizerError if this
        fails, or if the model cannot use the tokenizer."""
        if self.model.name_or_path is None:
            tokenizer = self._trained()
            config = _scratch_config(self.model)
        else:
            tokenizer, config = _load(self.model)
        if task_class(self.model.task).texts.form == "words":
            _put_space_before_words(tokenizer)
        make_usable(tokenizer, config, self.model)
        limits = tokenizer.model_max_length, usable_positions(config, tokenizer)
        tokenizer.model_max_length = min(int(limit or NO_LIMIT) for limit in limits)
        # A class such as GPT2Tokenizer returns no token type ids without naming them.
        tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names
        return tokenizer

    def _trained(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        columns, size = self._columns.columns, self.tokenize.vocab_size
        inputs = ["input_ids", "attention_mask"]
        chunks = [chunk for column in columns for chunk in _texts(column).chunks]
        texts = pa.chunked_array(chunks)
        if _writes(self.model):
            logger.info("training a tokenizer of %s byte-level pieces", f"{size:,}")
            made = byte_pieces.train_byte_pieces(texts, size)
            options = {**byte_pieces.OPTIONS, ENDS_TEXTS: True}
        else:
            if task_class(self.model.task).texts.whole_words:
                made = _words(texts, size)
            else:
                logger.info("training a tokenizer of %s word pieces", f"{size:,}")
                made = word_pieces.train_word_pieces(texts, size)
            options = dict(word_pieces.OPTIONS)
            if len(columns) > 1 and _has_type_ids(self.model):
                inputs.insert(1, "token_type_ids")
        return PreTrainedTokenizerFast(
            tokenizer_object=made,
            model_max_length=NO_LIMIT,
            model_input_names=inputs,
            **options,
        )


def _texts(column: Any) -> Any:
    """Return a column of texts. Lists of texts are flattened."""
    return pc.list_flatten(column) if pa.types.is_list(column.type) else column


def _scratch_config(model: ModelSettings) -> dict[str, Any]:
    """Return the entries of `model.config` that limit positions or the vocabulary."""
    names = ("model_type", "max_position_embeddings", "n_positions", "vocab_size")
    return {name: model.config[name] for name in names if name in model.config}


def _put_space_before_words(tokenizer: Any) -> None:
    """Make a byte-level tokenizer (GPT-2, RoBERTa) add a space before each word. Words
    are encoded one by one, and their tokens depend on the space."""
    from tokenizers.pre_tokenizers import ByteLevel

    before = tokenizer.backend_tokenizer.pre_tokenizer
    if isinstance(before, ByteLevel) and not before.add_prefix_space:
        before.add_prefix_space = True
        tokenizer.init_kwargs["add_prefix_space"] = True
        tokenizer.add_prefix_space = True  # replaces the option when it is saved


def _has_type_ids(model: ModelSettings) -> bool:
    from transformers import AutoConfig

    config = AutoConfig.for_model(**model.config)
    return int(getattr(config, "type_vocab_size", 0)) > 1


def _writes(model: ModelSettings) -> bool:
    task = task_class(model.task)
    return task.texts.completions and not task.texts.whole_words


def _words(texts: Any, vocab_size: int) -> Any:
    """Return a tokenizer whose vocabulary consists of the most frequent words. Raises
    TokenizerError if the texts contain only one distinct word."""
    words, num_all = word_pieces.commonest_words(texts, vocab_size)
    if num_all < 2:
        raise TokenizerError(
            f"train_rows has only one key, {words[0]!r}, so there is no next key to "
            "predict. Check the key column of raw_texts in the catalog"
        )
    if num_all > len(words):
        logger.warning(
            "%s of %s keys are unknown to the tokenizer, the rarest: raise "
            "tokenize.vocab_size",
            *(f"{num_all - len(words):,}", f"{num_all:,}"),
        )
    logger.info("a tokenizer of %s keys", f"{len(words):,}")
    return word_pieces.word_tokenizer(words)


def _load(model: ModelSettings) -> tuple[Any, dict[str, Any]]:
    """Return the tokenizer of a checkpoint, and the checkpoint's config updated with
    `model.overrides`. Raises TokenizerError if the tokenizer cannot be loaded."""
    from transformers import AutoConfig, AutoTokenizer

    name = str(model.name_or_path)
    where = {
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
        **where_to_look(name),
    }
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **where)
        config = AutoConfig.from_pretrained(name, **where).to_dict()
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise TokenizerError(_not_found(name, error)) from error
    return without_loading_options(tokenizer), {**config, **model.applied_config}


def without_loading_options(tokenizer: Any) -> Any:
    """Return `tokenizer` without the loading options, which transformers would
    otherwise save in its config."""
    for name in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(name, None)
    return tokenizer


AWAY = (
    "not there: it cannot be reached from here (HF_HUB_ETAG_TIMEOUT: seconds to wait)"
)


def _not_found(name: str, error: Exception) -> str:
    folder = Path(name)
    if folder.is_dir():
        present = sorted(path.name for path in folder.iterdir())[:20]
        place = f"The folder {folder.resolve()} has: {', '.join(present) or 'no files'}"
    else:
        from huggingface_hub.constants import HF_HUB_CACHE

        reached = "there" if answers() else AWAY
        place = (
            f"There is no folder {folder.resolve()}; as a name on the Hugging Face Hub "
            f"it was looked for in the cache {HF_HUB_CACHE} and {reached}"
        )
    return (
        f"model.name_or_path {name!r}: its tokenizer could not be loaded. Looked for "
        "config.json, tokenizer_config.json and tokenizer.json (or vocab.txt, "
        f"vocab.json with merges.txt, tokenizer.model). {place}. Set "
        "model.name_or_path to a folder with these files, fill the cache on a machine "
        f"with network, or set it to null to train from scratch. "
        f"({type(error).__name__}: "
        f"{first_line(error)})"
    )
