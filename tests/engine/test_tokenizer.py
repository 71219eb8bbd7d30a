"""The tokenizer is trained or loaded and checked, with clear error messages."""

import json
from types import SimpleNamespace

import datasets
import pytest
import transformers
from tokenizers import decoders, pre_tokenizers, processors
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast

from flatout.engine.files.keyed_folder import write_whole
from flatout.engine.parameters import ModelSettings, TokenizeSettings
from flatout.engine.rows.vocabulary import Vocabulary
from flatout.engine.tasks import TaskError, make_task
from flatout.engine.tokenizing.tokenizer import (
    TokenizerError,
    TokenizerFile,
    TokenizerRecipe,
)
from flatout.engine.tokenizing.tokenizer_checks import make_usable, usable_positions
from flatout.engine.tokenizing.word_pieces import SPECIAL_TOKENS, train_word_pieces
from tests.make import byte_pairs

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "\ud55c\uad6d\uc5b4 \ubb38\uc7a5\uc744 \uadf8\ub300\ub85c \ub450\uc5b4\ub77c",
    "emoji \U0001f600 and \U0001f1f0\U0001f1f7 stay, caf\xe9 too",
] * 20
ROWS = datasets.Dataset.from_dict({"text": TEXTS})
SCRATCH = ModelSettings(config={"model_type": "bert"})


def recipe_of(model, rows=ROWS, **options):
    return TokenizerRecipe(rows, model, TokenizeSettings(**options))


def column(texts):
    return datasets.Dataset.from_dict({"text": texts}).data.table.column("text")


def saved(folder, model, **options):
    recipe = recipe_of(model, **options)
    write_whole(folder, recipe.key, recipe.write)
    return TokenizerFile(folder)


def test_training_twice_gives_the_same_tokenizer():
    first, second = (train_word_pieces(column(TEXTS), 300).to_str() for _ in range(2))
    assert first == second


def test_special_tokens_come_first_and_pieces_fill_the_vocabulary():
    tokenizer = train_word_pieces(column(TEXTS), 130)
    assert [tokenizer.id_to_token(i) for i in range(5)] == list(SPECIAL_TOKENS)
    assert tokenizer.get_vocab_size() == 130
    encoding = tokenizer.encode("the", "the the")
    assert encoding.tokens == ["[CLS]", "the", "[SEP]", "the", "the", "[SEP]"]
    assert encoding.type_ids == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("text", TEXTS[:3])
def test_hangul_emoji_and_accents_stay_whole(text):
    tokenizer = train_word_pieces(column(TEXTS), 400)
    encoding = tokenizer.encode(text)
    assert "[UNK]" not in encoding.tokens
    squeezed = tokenizer.decode(encoding.ids).replace(" ", "")
    assert squeezed == text.lower().replace(" ", "")


def test_rare_letters_do_not_crowd_out_the_pieces():
    rare = [chr(0x4E00 + i) for i in range(500)]
    tokenizer = train_word_pieces(column(TEXTS + rare), 150)
    letters = [token for token in tokenizer.get_vocab() if token.startswith("##")]
    assert tokenizer.get_vocab_size() == 150
    assert sum(len(token) == 3 for token in letters) == 50
    assert "[UNK]" not in tokenizer.encode("the quick brown fox").tokens


@pytest.mark.timeout(60)
def test_words_too_long_to_be_split_are_not_trained_on():
    letters = "ab cd ef gh " * 10
    usual = train_word_pieces(column([*TEXTS, letters, "zq " * 20]), 300)
    texts = [*TEXTS, letters, "zq " * 20, "zq" * 250_000]
    tokenizer = train_word_pieces(column(texts), 300)
    assert tokenizer.get_vocab() == usual.get_vocab()
    assert tokenizer.encode("zq" * 50, add_special_tokens=False).tokens != ["[UNK]"]
    assert tokenizer.encode("zq" * 51, add_special_tokens=False).tokens == ["[UNK]"]


def test_words_of_the_greatest_length_are_trained_on():
    word = "zq" * 50
    tokenizer = train_word_pieces(column([word] * 50), 300)
    assert tokenizer.encode(word, add_special_tokens=False).tokens == [word]


def test_a_trained_tokenizer_opens_in_transformers(tmp_path):
    model = ModelSettings(config={"model_type": "bert", "max_position_embeddings": 128})
    file = saved(tmp_path / "t", model, vocab_size=130)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "t")
    assert (loaded.padding_side, loaded.model_max_length, len(loaded)) == (
        "right",
        128,
        130,
    )
    assert (loaded.pad_token, loaded.mask_token) == ("[PAD]", "[MASK]")
    assert file.max_positions == 128
    assert file.token_id("cls_token") == loaded.cls_token_id
    assert loaded("the dog")["input_ids"] == file.backend.encode("the dog").ids


def test_the_key_follows_the_texts_and_the_size():
    def key(rows=ROWS, **options):
        return recipe_of(SCRATCH, rows, **options).key

    assert key().digest == key().digest
    assert key(vocab_size=300).changes_since(key()) == ["vocab_size: 8000 -> 300"]
    assert key(max_length=64).digest == key().digest
    (change,) = key(ROWS.select(range(10))).changes_since(key())
    assert change.startswith("rows: ")


def byte_level(**tokens):
    """A tokenizer like GPT-2's without padding, start and unknown tokens."""
    splitting = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = byte_pairs(TEXTS, 400, splitting)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)


def checkpoint(folder, tokenizer, **config):
    tokenizer.save_pretrained(folder)
    config = {"model_type": "gpt2", "vocab_size": 400, "n_positions": 64, **config}
    (folder / "config.json").write_text(json.dumps(config))
    return ModelSettings(name_or_path=str(folder), task=config.pop("task", "causal-lm"))


def test_a_missing_pad_token_becomes_the_end_and_it_warns(tmp_path, caplog):
    left = {"padding_side": "left", "truncation_side": "left"}
    tokenizer = byte_level(eos_token="<|end|>", **left)
    model = checkpoint(tmp_path / "gpt2", tokenizer)
    file = saved(tmp_path / "t", model)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "t")
    assert (loaded.pad_token, loaded.padding_side) == ("<|end|>", "right")
    assert loaded.truncation_side == "right"
    assert "truncation_side is 'left'" in caplog.text
    assert file.max_positions == 64
    assert "pad and end of sequence are both '<|end|>'" in caplog.text


def test_text_survives_a_byte_level_tokenizer(tmp_path):
    model = checkpoint(tmp_path / "gpt2", byte_level(eos_token="<|end|>"))
    file = saved(tmp_path / "t", model)
    loaded = AutoTokenizer.from_pretrained(file.folder)
    for text in TEXTS[:3]:
        assert loaded.decode(file.backend.encode(text).ids) == text


def gpt2():
    """A tokenizer of the class that GPT-2 uses."""
    pieces = json.loads(byte_level().backend_tokenizer.to_str())["model"]
    merges = [tuple(pair) for pair in pieces["merges"]]
    return GPT2Tokenizer(
        vocab=pieces["vocab"], merges=merges, unk_token="a", eos_token="a"
    )


def test_token_type_ids_are_made_only_if_transformers_returns_them(tmp_path):
    model = checkpoint(tmp_path / "gpt2", gpt2(), task="sequence-classification")
    file = saved(tmp_path / "t", model)
    assert "token_type_ids" not in AutoTokenizer.from_pretrained(file.folder)("a", "b")
    assert not file.gives_type_ids
    config = file.folder / "tokenizer_config.json"
    unnamed = json.loads(config.read_text())
    del unnamed["model_input_names"]
    for kind in ("GPT2Tokenizer", "BertTokenizerFast", "TokenizersBackend"):
        config.write_text(json.dumps(unnamed | {"tokenizer_class": kind}))
        names = getattr(transformers, kind).model_input_names
        assert TokenizerFile(file.folder).gives_type_ids == ("token_type_ids" in names)


def test_transformers_reads_a_space_before_words_from_the_saved_tokenizer(tmp_path):
    tokenizer = gpt2()
    task = "token-classification"
    model = checkpoint(tmp_path / "gpt2", tokenizer, task=task)
    file, words = saved(tmp_path / "t", model), ["quick", "fox"]
    expected = AutoTokenizer.from_pretrained(tmp_path / "gpt2", add_prefix_space=True)
    loaded = AutoTokenizer.from_pretrained(file.folder)
    ids = expected(words, is_split_into_words=True)["input_ids"]
    assert loaded(words, is_split_into_words=True)["input_ids"] == ids
    assert file.backend.encode(words, is_pretokenized=True).ids == ids


@pytest.mark.parametrize(
    ("tokens", "config", "task", "fault"),
    [
        ({}, {}, "causal-lm", "there is no pad, end, unknown or start token"),
        (
            {"eos_token": "<|end|>"},
            {"vocab_size": 10},
            "causal-lm",
            r"\d+ tokens, but the checkpoint's vocab_size is 10",
        ),
        ({"eos_token": "<|end|>"}, {}, "masked-lm", "this tokenizer has no mask token"),
    ],
)
def test_a_tokenizer_that_cannot_be_used(tmp_path, tokens, config, task, fault):
    model = checkpoint(tmp_path / "gpt2", byte_level(**tokens), **config)
    model = model.model_copy(update={"task": task})
    with pytest.raises(TokenizerError, match=fault):
        recipe_of(model).build()


def test_a_tokenizer_without_rust():
    slow = SimpleNamespace(is_fast=False, name_or_path="slow")
    with pytest.raises(TokenizerError, match="convert it with transformers first"):
        make_usable(slow, {}, SCRATCH)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "bert", "max_position_embeddings": 512}, 512),
        (
            {
                "model_type": "roberta",
                "max_position_embeddings": 514,
                "pad_token_id": 1,
            },
            512,
        ),
        ({"model_type": "roberta", "max_position_embeddings": 514}, 512),
        ({"model_type": "gpt2", "n_positions": 1024}, 1024),
        ({"model_type": "t5"}, None),
    ],
)
def test_positions_that_rows_may_use(config, expected):
    assert usable_positions(config) == expected


def test_a_folder_without_a_tokenizer_says_what_was_looked_for(tmp_path):
    (tmp_path / "README.md").write_text("nothing")
    model = ModelSettings(name_or_path=str(tmp_path))
    with pytest.raises(TokenizerError) as error:
        recipe_of(model).build()
    text = str(error.value)
    assert "Looked for config.json, tokenizer_config.json and tokenizer.json" in text
    assert f"The folder {tmp_path} has: README.md" in text
    assert "Set model.name_or_path to a folder with these files" in text


def test_a_checkpoints_files_are_part_of_the_key(tmp_path):
    model = checkpoint(tmp_path / "gpt2", byte_level(eos_token="<|end|>"))
    before = recipe_of(model).key
    checkpoint(tmp_path / "gpt2", byte_level(eos_token="<|end|>"), n_positions=32)
    after = recipe_of(model).key
    assert [change.split(":")[0] for change in after.changes_since(before)] == ["files"]


def test_a_hub_name_is_keyed_by_the_commit_of_the_cache(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    def files(revision=None):
        model = ModelSettings(name_or_path="org/name", revision=revision)
        return recipe_of(model).key.fields["files"]

    assert files() is None
    (warning,) = caplog.messages
    assert "set model.revision to a commit" in warning
    refs = tmp_path / "models--org--name" / "refs"
    refs.mkdir(parents=True)
    for commit in ("a" * 40, "b" * 40):
        (refs / "main").write_text(commit)
        assert files() == commit
    assert files("c" * 40) == "c" * 40
    assert len(caplog.messages) == 1


def test_masked_lm_needs_a_mask_token():
    vocabulary = Vocabulary(9, 0, None, (0, 1))
    with pytest.raises(TaskError, match="has no mask token"):
        make_task(
            ModelSettings(task="masked-lm", config={"model_type": "bert"}),
            (),
            vocabulary,
        )
