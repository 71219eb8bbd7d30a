"""Token rows have the same ids as in transformers, however they are created."""

import datasets
import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flatout.engine.files.arrow_folder import write_recipe
from flatout.engine.models.building import ModelError
from flatout.engine.parameters import ModelSettings, Settings, TokenizeSettings
from flatout.engine.predict.checks import check_tokens
from flatout.engine.tokenizing.encoders import encode
from flatout.engine.tokenizing.encoders.encode import TokensError
from flatout.engine.tokenizing.token_keys import (
    StaleTokensError,
    check_tokens_match,
    token_key,
)
from flatout.engine.tokenizing.token_recipes import (
    label_names_of,
    split_recipes,
    tokens_recipe,
)
from flatout.engine.tokenizing.tokenizer import TokenizerFile
from tests.make import byte_pairs, saved_tokenizer

WORDS = "the quick brown fox jumps over a lazy \ud55c\uad6d\uc5b4 \U0001f600".split()
MODEL = ModelSettings(config={"model_type": "bert", "max_position_embeddings": 64})
TOKENIZE = TokenizeSettings(max_length=16, vocab_size=200)
CUT = {"truncation": True, "max_length": 16}


def texts_of(count, seed=0):
    """Return texts, most of them short, and some many times longer than
    `max_length`."""
    random = np.random.default_rng(seed)
    sizes = np.minimum(random.pareto(1.0, count) * 4 + 1, 400).astype(int)
    return [" ".join(random.choice(WORDS, size)) for size in sizes]


def rows_of(texts, **columns):
    return datasets.Dataset.from_dict({"text": texts, **columns})


@pytest.fixture(scope="module")
def word_pieces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return saved_tokenizer(folder, rows_of(texts_of(300)), MODEL, TOKENIZE)


@pytest.fixture(scope="module")
def theirs(word_pieces):
    """The same tokenizer, loaded by transformers."""
    return AutoTokenizer.from_pretrained(word_pieces.folder)


def bpe(folder, space):
    """Save a BPE tokenizer with byte-level pieces (in which `space` is a letter) or
    Metaspace pieces."""
    tokenizer = byte_pairs(texts_of(300), 500, space, ["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )
    wrapped.save_pretrained(folder)
    return TokenizerFile(folder)


def recipe_of(tokenizer, rows, names=None, model=MODEL, tokenize=TOKENIZE):
    names = label_names_of(rows) if names is None else names
    return tokens_recipe("train_tokens", rows, tokenizer, names, model, tokenize)


def test_ids_labels_and_lengths_of_each_row(word_pieces, theirs):
    texts = texts_of(500)
    rows = rows_of(texts, label=[["b", "a", "c"][i % 3] for i in range(500)])
    tokens = recipe_of(word_pieces, rows).to_dataset()
    expected = theirs(texts, **CUT)["input_ids"]
    assert tokens["input_ids"][:] == expected
    assert tokens["length"][:] == list(map(len, expected))
    assert tokens["labels"][:] == [[1, 0, 2][i % 3] for i in range(500)]
    kinds = {
        name: str(kind)
        for name, kind in zip(
            tokens.column_names, tokens.data.schema.types, strict=True
        )
    }
    assert kinds == {
        "input_ids": "list<item: int32>",
        "labels": "int64",
        "text_hash": "uint64",
        "length": "int32",
    }


@pytest.mark.parametrize(
    "space",
    [
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Metaspace(),
        pre_tokenizers.Whitespace(),
    ],
)
def test_long_texts_give_what_the_whole_text_gives(tmp_path, space):
    file = bpe(tmp_path, space)
    texts = texts_of(400, seed=1)
    tokens = recipe_of(file, rows_of(texts)).to_dataset()
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert tokens["input_ids"][:] == theirs(texts, **CUT)["input_ids"]


@pytest.mark.parametrize("task", ["next-key", "causal-lm", "bidirectional-lm"])
def test_a_cut_text_has_no_end_where_ends_are_learnt(word_pieces, theirs, task):
    """Rows have the first tokens of the whole text, as in transformers, even if only
    the end token does not fit."""
    texts = [*texts_of(200), "fox " * 14, "fox " * 15, "fox " * 16]
    model = MODEL.model_copy(update={"task": task})
    recipe = recipe_of(word_pieces, rows_of(texts), model=model)
    whole = theirs(texts)["input_ids"]
    tokens = recipe.to_dataset()
    assert tokens["input_ids"][:] == [ids[:16] for ids in whole]
    assert recipe.facts()["cut_rows"] == sum(len(ids) > 16 for ids in whole)


def test_the_cut_rows_are_counted_exactly(word_pieces, theirs, tmp_path):
    texts = texts_of(500)
    recipe = recipe_of(word_pieces, rows_of(texts))
    write_recipe(tmp_path / "tokens", recipe)
    ids = theirs(texts)["input_ids"]
    assert recipe.facts()["cut_rows"] == sum(len(row) > 16 for row in ids)
    lengths = [min(len(row), 16) for row in ids]
    noted = recipe.facts()["tokens"]
    assert (noted["num_tokens"], noted["longest"]) == (sum(lengths), max(lengths))


def test_parts_cover_all_rows_once_and_are_of_one_size(word_pieces, monkeypatch):
    monkeypatch.setattr(encode, "UNIT_BYTES", 2_000)
    parts = list(recipe_of(word_pieces, rows_of(texts_of(700)))._encode())
    assert [start for start, *_ in parts] == [0] + [stop for _, stop, _ in parts[:-1]]
    assert parts[-1][1] == 700 and len(parts) > 5
    assert len({stop - start for start, stop, _ in parts[:-1]}) == 1
    assert all(len(part.lengths) == stop - start for start, stop, part in parts)


@pytest.mark.parametrize("numbers", [[7, 3, 30], range(4, 9)])
def test_rows_that_were_selected_are_the_rows_encoded(
    word_pieces, theirs, tmp_path, numbers
):
    texts = texts_of(50)
    rows_of(texts).save_to_disk(tmp_path / "rows")
    rows = datasets.load_from_disk(str(tmp_path / "rows")).select(numbers)
    recipe = recipe_of(word_pieces, rows)
    copied = recipe_of(word_pieces, rows_of(rows["text"][:]))
    assert recipe.key.digest == copied.key.digest
    expected = theirs([texts[i] for i in numbers], **CUT)
    assert recipe.to_dataset()["input_ids"][:] == expected["input_ids"]


def test_pairs_have_type_ids_and_are_cut_together(word_pieces, tmp_path):
    texts, pairs = texts_of(200), texts_of(200, seed=2)
    rows = rows_of(texts, text_pair=pairs)
    assert "token_type_ids" not in recipe_of(word_pieces, rows).to_dataset().features
    names = ["input_ids", "token_type_ids", "attention_mask"]
    theirs = AutoTokenizer.from_pretrained(word_pieces.folder, model_input_names=names)
    theirs.save_pretrained(tmp_path)
    tokens = recipe_of(TokenizerFile(tmp_path), rows).to_dataset()
    expected = theirs(texts, pairs, **CUT)
    assert tokens["input_ids"][:] == expected["input_ids"]
    assert tokens["token_type_ids"][:] == expected["token_type_ids"]
    for row, length in zip(
        tokens["token_type_ids"][:], tokens["length"][:], strict=True
    ):
        assert len(row) == length and set(row) == {0, 1} and row == sorted(row)


@pytest.mark.parametrize("max_length", [16, 17])
def test_long_pairs_are_cut_as_transformers_cuts_them(word_pieces, theirs, max_length):
    """The texts may have nearly the same length: the longer one decides where a pair is
    cut."""
    sizes = [(300, 300), (301, 300), (300, 301), (400, 5), (5, 400), (40, 300), (9, 9)]
    texts = ["the" + " fox" * n for n, _ in sizes]
    pairs = ["the" + " lazy" * n for _, n in sizes]
    texts += [" fox" * 400 + " lazy", "x" * 900]
    pairs += [" lazy" * 403, "fox " * 200]
    tokenize = TOKENIZE.model_copy(update={"max_length": max_length})
    rows = rows_of(texts, text_pair=pairs)
    tokens = recipe_of(word_pieces, rows, tokenize=tokenize).to_dataset()
    expected = theirs(texts, pairs, truncation=True, max_length=max_length)
    assert tokens["input_ids"][:] == expected["input_ids"]


def test_targets_of_a_regression_stay_numbers(word_pieces):
    model = MODEL.model_copy(update={"task": "regression"})
    rows = rows_of(["a b", "c"], label=[0.25, -3.0])
    tokens = recipe_of(word_pieces, rows, model=model).to_dataset()
    assert tokens["labels"][:] == [0.25, -3.0]


def test_unlabelled_rows_have_no_labels(word_pieces):
    model = MODEL.model_copy(update={"task": "masked-lm"})
    assert recipe_of(
        word_pieces, rows_of(["a"]), model=model
    ).to_dataset().column_names == [
        "input_ids",
        "length",
    ]


def test_a_text_without_tokens_gets_one(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>"
    ).save_pretrained(tmp_path)
    tokens = recipe_of(TokenizerFile(tmp_path), rows_of(["a a", " ", "a"])).to_dataset()
    assert tokens["input_ids"][:] == [[1, 1], [0], [1]]
    assert tokens["length"][:] == [2, 1, 1]


def test_a_label_that_train_never_has(word_pieces):
    rows = rows_of(["a", "b", "c"], label=["x", "y", "z"])
    with pytest.raises(TokensError) as error:
        recipe_of(word_pieces, rows, names=["x", "y"]).to_dataset()
    assert str(error.value) == (
        "train_tokens: 1 rows have a label that train does not have, the first 'z' in "
        "row 2. Add rows with this label to train, or remove these"
    )


def test_labels_of_more_than_two_gib(word_pieces):
    """The bytes of one label are repeated until they exceed the size of a single
    array."""
    name = "x" * (32 << 20)
    chunk = pa.array(["a", name, "b"])
    labels = pa.chunked_array([chunk] * 66)
    texts = pa.chunked_array([pa.array(["t"] * len(chunk))] * 66)
    table = pa.table({"text": texts, "label": labels})
    rows = datasets.Dataset(table, fingerprint="x")
    recipe = recipe_of(word_pieces, rows, names=["a", "b", name])
    recipe._check_labels()
    assert recipe._targets(0, len(rows)).to_pylist() == [0, 2, 1] * 66
    assert recipe._targets(2, 7).to_pylist() == [1, 0, 2, 1, 0]


def test_targets_of_rows_in_several_chunks(word_pieces):
    """The rows of a batch may lie in any number of the chunks of the label column."""
    names = [str(label) for label in range(5)]
    labels = [names[i * i % 5] for i in range(300)]
    parts = [
        rows_of(texts_of(100), label=labels[at : at + 100]) for at in (0, 100, 200)
    ]
    rows = datasets.concatenate_datasets(parts)
    tokens = recipe_of(word_pieces, rows, names=names).to_dataset()
    assert [names[label] for label in tokens["labels"]] == labels


@pytest.mark.parametrize(
    ("limits", "fault"),
    [
        (
            {"max_length": 65},
            "^tokenize.max_length is 65, but the model accepts at most 64 tokens per "
            "row: set tokenize.max_length to 64 or less",
        ),
        ({"max_length": 2}, "no token of the text would be left"),
        ({"max_length": 16, "join_texts": True}, "join_texts is for language models"),
    ],
)
def test_limits_that_do_not_fit_are_refused(word_pieces, limits, fault):
    with pytest.raises(TokensError, match=fault):
        recipe_of(word_pieces, rows_of(["a"]), tokenize=TokenizeSettings(**limits))


@pytest.mark.parametrize("text", ["word " * 2_000_000, "x" * 1_000_000])
def test_one_huge_text(word_pieces, theirs, text):
    tokens = recipe_of(word_pieces, rows_of(["a b", text])).to_dataset()
    assert tokens[1]["input_ids"] == theirs(text[:1000], **CUT)["input_ids"]


def test_a_huge_text_in_a_pair(word_pieces, theirs):
    rows = rows_of(["word " * 40_000, "a b"], text_pair=["a b", "word " * 4_000])
    tokens = recipe_of(word_pieces, rows).to_dataset()
    texts, pairs = ["word " * 100, "a b"], ["a b", "word " * 100]
    expected = theirs(texts, pairs, **CUT)
    assert tokens["input_ids"][:] == expected["input_ids"]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["10", "9", "9"], ["9", "10"]),
        (["10.0", "9.0", "-1"], ["-1", "9.0", "10.0"]),
        (["9.0", "2", "9"], ["2", "9", "9.0"]),
        (["10", "9", "nan"], ["10", "9", "nan"]),
        (["b", "10", "a"], ["10", "a", "b"]),
        ([0.5, 0.25, 1.0], []),
    ],
)
def test_names_of_labels(labels, names):
    assert label_names_of(rows_of(["a", "b", "c"], label=labels)) == names


def settings_of(model=MODEL, tokenize=TOKENIZE):
    return Settings(model=model, tokenize=tokenize)


def stored_splits(folder, tokenizer, rows, names=()):
    """Write the token rows of two splits to `folder` and read them again."""
    found = {}
    recipes = split_recipes(rows, tokenizer, list(names), MODEL, TOKENIZE)
    for name, recipe in zip(rows, recipes, strict=True):
        write_recipe(folder / name, recipe)
        found[name] = datasets.load_from_disk(str(folder / name))
    return found


def two_splits(text="a b"):
    return {"train": rows_of([text]), "test": rows_of(["c"])}


def refusal(tokens, tokenizer, settings=None, names=()):
    theirs = AutoTokenizer.from_pretrained(tokenizer.folder)
    with pytest.raises(StaleTokensError) as error:
        check_tokens_match(tokens, settings or settings_of(), theirs, names)
    head, what = str(error.value).split(" (then -> now): ")
    what, advice = what.split(". Run ")
    assert head == "the token rows were created from other inputs"
    assert advice == (
        "kedro run --pipelines=split,tokenize with the same --env and --params, or set "
        "the parameters back"
    )
    return what


def test_another_kind_of_label_needs_another_split(word_pieces, tmp_path):
    tokens = stored_splits(tmp_path, word_pieces, two_splits())
    model = MODEL.model_copy(update={"task": "regression"})
    said = refusal(tokens, word_pieces, settings_of(model))
    assert said == (
        'model.task: "sequence-classification" -> "regression" '
        "(train_tokens, test_tokens)"
    )


@pytest.mark.parametrize(
    ("task", "columns"),
    [
        ("regression", {"label": ["pos", "neg"]}),
        ("sequence-classification", {"label": [0.5, 1.0]}),
        ("embedding", {}),
        ("masked-lm", {"passages": [["c"], ["d"]]}),
        ("masked-lm", {"completion": ["c", "d"]}),
        ("reranking", {"label": [0.5, 1.0]}),
    ],
)
def test_rows_that_were_split_for_another_task(word_pieces, task, columns):
    model = MODEL.model_copy(update={"task": task})
    with pytest.raises(TokensError) as error:
        recipe_of(word_pieces, rows_of(["a", "b"], **columns), [], model)
    assert str(error.value) == (
        f"train_tokens: the rows were split for another task than {task}. Run kedro "
        "run --pipelines=split,tokenize, or set model.task back"
    )


def test_tokens_of_other_parameters_are_refused_by_name(word_pieces, theirs, tmp_path):
    tokens = stored_splits(tmp_path, word_pieces, two_splits())
    check_tokens_match(tokens, settings_of(), theirs, [])
    other = settings_of(tokenize=TokenizeSettings(max_length=32, vocab_size=100))
    assert refusal(tokens, word_pieces, other) == (
        "tokenize.max_length: 16 -> 32 (train_tokens, test_tokens); "
        "tokenize.vocab_size: 200 -> 100 (train_tokens, test_tokens)"
    )


def test_tokens_of_another_tokenizer_or_other_labels_are_refused(word_pieces, tmp_path):
    tokens = stored_splits(tmp_path / "old", word_pieces, two_splits(), ["x"])
    newer = bpe(tmp_path / "newer", pre_tokenizers.Whitespace())
    tokens["test"] = stored_splits(tmp_path / "new", newer, two_splits(), ["x"])["test"]
    assert refusal(tokens, newer, names=["x"]) == (
        "tokenizer: its files have changed (train_tokens)"
    )
    tokens = stored_splits(tmp_path / "old", word_pieces, two_splits(), ["x"])
    assert refusal(tokens, word_pieces, names=["w", "x"]) == (
        "label_names: 1 -> 2, such as 'w' (train_tokens, test_tokens)"
    )


def test_splits_of_two_states_of_the_data_are_refused(word_pieces, tmp_path):
    tokens = stored_splits(tmp_path / "old", word_pieces, two_splits())
    grown = stored_splits(tmp_path / "new", word_pieces, two_splits("a b c"))
    mixed = {**tokens, "train": grown["train"]}
    assert refusal(mixed, word_pieces) == (
        "splits: they are from different data (train_tokens, test_tokens)"
    )


def test_tokens_without_a_key_pass_with_a_warning(word_pieces, theirs, caplog):
    tokens = recipe_of(word_pieces, rows_of(["a b"])).to_dataset()
    check_tokens_match({"train": tokens}, settings_of(), theirs, [])
    assert "train_tokens: rows without a key are used as they are" in caplog.text
    assert token_key(tokens) == token_key(tokens.select(range(1)))


def test_the_key_of_stored_tokens_is_their_digest(word_pieces, tmp_path):
    recipe = recipe_of(word_pieces, rows_of(["a b", "c", "d"]))
    write_recipe(tmp_path / "tokens", recipe)
    tokens = datasets.load_from_disk(str(tmp_path / "tokens"))
    assert token_key(tokens) == recipe.key.digest
    keys = {token_key(tokens.select(part)) for part in ([0, 1], [1, 0], range(2))}
    assert len(keys) == 2 and recipe.key.digest not in keys


@pytest.mark.parametrize("size", [7, 1000])
def test_joined_texts_keep_every_token_and_the_documents_bounds(
    word_pieces, theirs, monkeypatch, size
):
    monkeypatch.setattr(encode, "UNIT_BYTES", size)
    model = MODEL.model_copy(update={"task": "causal-lm"})
    texts = texts_of(60)
    tokenize = TokenizeSettings(max_length=16, join_texts=True)
    blocks = recipe_of(
        word_pieces, rows_of(texts), model=model, tokenize=tokenize
    ).to_dataset()
    documents = theirs(texts)["input_ids"]
    assert [i for ids in blocks["input_ids"] for i in ids] == [
        i for ids in documents for i in ids
    ]
    assert blocks["length"][:-1] == [16] * (len(blocks) - 1)
    ends, position = set(), 0
    for ids in documents:
        position += len(ids)
        ends.add(position)
    found, position = set(), 0
    for parts in blocks["document_lengths"]:
        for part in parts:
            position += part
            found.add(position)
    block_ends = {16 * i for i in range(1, len(blocks))}
    assert found == ends | block_ends | {position}


def test_documents_are_told_apart_by_the_end_token(tmp_path):
    file = bpe(tmp_path, pre_tokenizers.ByteLevel(add_prefix_space=False))
    plain = file.backend
    plain.post_processor = processors.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>").save_pretrained(
        tmp_path
    )
    file = TokenizerFile(tmp_path)
    model = ModelSettings(task="causal-lm", config={"model_type": "gpt2"})
    tokenize = TokenizeSettings(max_length=64, join_texts=True)
    (row,) = recipe_of(
        file, rows_of(["the fox", "a dog"]), model=model, tokenize=tokenize
    ).to_dataset()
    first, second = (file.backend.encode(text).ids for text in ("the fox", "a dog"))
    assert row["input_ids"] == [*first, 1, *second, 1]
    assert row["document_lengths"] == [len(first) + 1, len(second) + 1]


def test_a_model_answers_no_tokens_of_another_tokenizer(word_pieces, theirs, tmp_path):
    """A tokenizer saved by transformers has other bytes but the same pieces."""
    recipe = recipe_of(word_pieces, rows_of(texts_of(20)))
    write_recipe(tmp_path / "tokens", recipe)
    tokens = datasets.load_from_disk(str(tmp_path / "tokens"))
    theirs.save_pretrained(tmp_path / "own")
    check_tokens(tokens, TokenizerFile(tmp_path / "own"))
    texts = rows_of([text.upper() + " z" for text in texts_of(300, seed=1)] + ["zebra"])
    other = saved_tokenizer(tmp_path / "other", texts, MODEL, TOKENIZE)
    with pytest.raises(ModelError, match="with another tokenizer than the model's"):
        check_tokens(tokens, other)
    check_tokens(tokens.select([0, 1]), other)  # unknown
