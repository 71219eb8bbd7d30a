"""Texts put together from words have the ids that the tokenizer gives them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from flatout.engine.tokenizing.encoders import word_pool
from flatout.engine.tokenizing.encoders.encoding import Encoder
from flatout.engine.tokenizing.encoders.plain_encoder import EncodeOptions
from flatout.engine.tokenizing.encoders.pre_tokenizing import (
    GPT2_PATTERN,
    on_ascii,
    splitter_for,
)

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
SAMPLE = [
    "The quick brown fox isn't jumping, it's 12345 times (or so) over __init__.py!",
    "Returns:\n\n    torch.Tensor: shape ``(B, T)``\n\t* "
    "\ud55c\uad6d\uc5b4 caf\xe9 \U0001f600",
] * 5


def word_piece(lowercase=True, strip=None):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def byte_level(*steps, normalizer=None):
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence(list(steps)) if steps[1:] else steps[0]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    return tokenizer


def split_by(pattern):
    return (
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    )


def words_of_spaces():
    tokenizer = Tokenizer(
        models.WordLevel({"[UNK]": 0, "the": 1, "fox": 2}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.StripAccents()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


KNOWN = {
    "bert": word_piece(),
    "bert cased": word_piece(lowercase=False),
    "bert with accents": word_piece(strip=False),
    "gpt2": byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "qwen2": byte_level(*split_by(QWEN2), normalizer=normalizers.NFC()),
    "llama3": byte_level(*split_by(LLAMA3)),
    "words": words_of_spaces(),
}
TEXT = st.lists(
    st.one_of(
        st.text(alphabet="ab'sTdLV09_.,(\n\t\r  ", max_size=6),
        st.sampled_from(
            ["the ", "fox", " isn't", "'LL", "\n\n  ", "[SEP]", "<|end|>", "12345"]
        ),
        st.sampled_from(["\x0b", "\x1c", "\x7f", "\x85", "\x00"]),
        st.text(
            alphabet="\xe9\u0301\ud55c\u1112\u1161\u4e2d\xa0\u2003\u200b\xad\ufffd\U0001f600\u0130\u03a3",
            max_size=4,
        ),
    ),
    max_size=12,
).map("".join)


def plain_ids(tokenizer, text, max_length):
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.enable_truncation(max_length)
    encoding = tokenizer.encode(text)
    return encoding.ids, bool(encoding.overflowing)


def check(tokenizer, texts, max_length):
    """Encoded `texts`; their ids are the tokenizer's own."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    encoder = Encoder(copy, EncodeOptions(max_length=max_length, empty_id=0))
    assert encoder._splitter is not None
    encoded = encoder.encode(pa.array(texts, pa.string()))
    expected = [plain_ids(tokenizer, text, max_length) for text in texts]
    ids = [ids or [0] for ids, _ in expected]
    assert encoded.ids.tolist() == [id_ for row in ids for id_ in row]
    assert encoded.lengths.tolist() == list(map(len, ids))
    assert encoded.cut.tolist() == [cut for _, cut in expected]
    return encoded


@pytest.mark.parametrize("name", list(KNOWN))
@given(texts=st.lists(TEXT, min_size=1, max_size=5), max_length=st.integers(3, 40))
@example(texts=SAMPLE[:2], max_length=40)
@example(texts=["a  \n\n  b"], max_length=40)
@example(texts=["a" * 200 + " b", "a b" * 100, "." * 300], max_length=3)
@example(texts=["x\u200b y \u200b z"], max_length=5)
@settings(max_examples=60)
def test_rows_of_words_are_rows_of_the_tokenizer(name, texts, max_length):
    encoded = check(KNOWN[name], texts, max_length)
    assert len(encoded.lengths) == len(texts)
    assert encoded.lengths.min() >= 1
    assert encoded.lengths.max() <= max_length


@pytest.mark.parametrize("name", list(KNOWN))
def test_a_full_pool_is_emptied_and_filled_again(name, monkeypatch):
    monkeypatch.setattr(word_pool, "MAX_WORDS", 8)
    encoder = Encoder(KNOWN[name], EncodeOptions(max_length=64))
    first = encoder.encode(pa.array(SAMPLE))
    assert encoder._pool._numbers == {}
    assert encoder.encode(pa.array(SAMPLE)).ids.tolist() == first.ids.tolist()


def test_an_added_token_in_the_text_is_one_token():
    tokenizer = word_piece()
    tokenizer.add_tokens([AddedToken("flat-out", normalized=True)])
    encoded = check(tokenizer, ["it is FLAT-OUT fast", "flat-out", "flat - out"], 20)
    rows = np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])
    added = tokenizer.token_to_id("flat-out")
    assert [row.tolist().count(added) for row in rows] == [1, 1, 0]


def test_many_added_tokens_are_known_by_how_they_begin():
    tokenizer = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.add_special_tokens([f"<|reserved_{i}|>" for i in range(50)])
    assert not splitter_for(tokenizer).is_safe("a <| b")
    encoded = check(tokenizer, ["a <|reserved_7|> b", "a <| b"], 20)
    added = tokenizer.token_to_id("<|reserved_7|>")
    assert encoded.ids.tolist().count(added) == 1


def unknown():
    prefixed = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True))
    with_space = word_piece()
    with_space.add_tokens(["two words"])
    dropped = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    dropped.model.dropout = 0.1
    replaced = word_piece()
    replaced.normalizer = normalizers.Replace("a", " ")
    metaspace = byte_level(pre_tokenizers.Metaspace())
    other = byte_level(*split_by(r"\p{Lu}+|\s+|\S"))
    return [prefixed, with_space, dropped, replaced, metaspace, other]


@pytest.mark.parametrize("index", range(6))
def test_rules_that_are_not_known_go_the_plain_way(index):
    splitter = splitter_for(unknown()[index])
    assert splitter is None or splitter.ascii is None


@pytest.mark.parametrize("pattern", [GPT2_PATTERN, QWEN2, LLAMA3])
def test_rules_on_ascii(pattern):
    text = "It's 1234 (or so):\n\n  x_1 isn't\t\tDONE  "
    assert "".join(on_ascii(pattern).findall(text)) == text
    assert on_ascii(GPT2_PATTERN).pattern == (
        r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
    )


@pytest.mark.parametrize(
    "pattern", [r"\p{Han}+", r"\d+", r"(?<=a)b", r"\p{L}+(", r"a$", r"\s+(?=b)"]
)
def test_rules_whose_meaning_is_not_certain(pattern):
    assert on_ascii(pattern) is None


def test_pieces_are_found_in_lowered_text_where_that_is_the_same():
    assert splitter_for(KNOWN["bert"]).pieces("The FOX's") == ["the", "fox", "'", "s"]
    assert splitter_for(KNOWN["bert cased"]).pieces("The FOX") == ["The", "FOX"]


def test_only_texts_with_something_special_are_not_safe():
    splitter = splitter_for(KNOWN["bert"])
    assert splitter.is_safe("a [list], \n\t \ud55c")
    assert not splitter.is_safe("the [SEP] token")
    assert splitter.is_safe("the [sep] token")
    assert not splitter.is_safe("a\x1cb")
