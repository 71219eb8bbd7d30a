"""Rows have the ids that the tokenizer gives to each text alone."""

import pyarrow as pa
import pytest
from hypothesis import example, given, settings, strategies as st
from tokenizers import (
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from flatout.engine.tokenizing.encoders.encoder import EncodeOptions, Encoder
from tests.make import byte_pairs

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SAMPLE = [
    "The quick brown fox isn't jumping, it's 12345 times (or so) over __init__.py!",
    "Returns:\n\n    torch.Tensor: shape ``(B, T)``\n\t* "
    "\ud55c\uad6d\uc5b4 caf\xe9 \U0001f600",
] * 5


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def qwen2():
    steps = [
        pre_tokenizers.Split(Regex(QWEN2), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer = byte_pairs(SAMPLE, 330, pre_tokenizers.Sequence(steps))
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


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
    "gpt2": byte_pairs(SAMPLE, 330, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "qwen2": qwen2(),
    "words": words_of_spaces(),
    "metaspace": byte_pairs(SAMPLE, 330, pre_tokenizers.Metaspace()),
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
    """Check that the ids of the encoded `texts` are those of the tokenizer."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    encoder = Encoder(copy, EncodeOptions(max_length=max_length, empty_id=0))
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
@example(texts=["a  \n\n  b", "IT'S"], max_length=40)
@example(texts=["a" * 200 + " b", "a b" * 100, "." * 300], max_length=3)
@example(texts=["x\u200b y \u200b z"], max_length=5)
@settings(max_examples=60)
def test_rows_are_those_of_the_tokenizer(name, texts, max_length):
    encoded = check(KNOWN[name], texts, max_length)
    assert len(encoded.lengths) == len(texts)
    assert encoded.lengths.min() >= 1
    assert encoded.lengths.max() <= max_length
