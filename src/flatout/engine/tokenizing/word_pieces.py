"""Train WordPiece and whole-word tokenizers on the train split, reproducibly."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow.compute as pc
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from flatout.engine.machine.environment import tokenizer_parallelism

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_NAMES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
OPTIONS = dict(zip(_NAMES, SPECIAL_TOKENS, strict=True))
"""Arguments for the tokenizer class of transformers."""
TRAINING_BYTES = 16 << 20
"""Maximum number of bytes of training text, taken from evenly spaced rows. More text
has little effect."""
COUNTED_TEXTS = 10_000
LONGEST_WORD = 100
"""Maximum length of a word in characters. Longer words are encoded as [UNK]."""
FORMAT_VERSION = 1
_CONTINUED = "##"


def train_word_pieces(texts: Any, vocab_size: int) -> Tokenizer:
    """Return a tokenizer that is trained on an Arrow column of texts. The tokenizer
    converts texts to lower case, and keeps accents, Hangul and emoji.

    The tokenizers library assigns ids to letters in hash map order, which differs from
    run to run. Passing all letters in sorted order makes the result reproducible.
    """
    sample = list(sampled(texts))
    letters, rare = _alphabet(sample, vocab_size // 3)
    first = [*SPECIAL_TOKENS, *(_CONTINUED + letter for letter in letters)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=first,
        initial_alphabet=letters,
        show_progress=False,
    )
    tokenizer = _untrained(_model({}))
    if _has_long_words(sample):
        tokenizer.pre_tokenizer = without_long_words(
            tokenizer.pre_tokenizer, LONGEST_WORD
        )
    without_rare = (text.translate(rare) for text in sample) if rare else iter(sample)
    with tokenizer_parallelism(True):
        tokenizer.train_from_iterator(without_rare, trainer)
    # Create a new model because the trainer marks the given letters as special tokens.
    finished = add_special_tokens_to_ends(_untrained(_model(tokenizer.get_vocab())))
    finished.decoder = decoders.WordPiece(prefix=_CONTINUED)
    return finished


def _model(vocabulary: dict[str, int]) -> models.WordPiece:
    return models.WordPiece(
        vocabulary,
        unk_token=SPECIAL_TOKENS[1],
        max_input_chars_per_word=LONGEST_WORD,
    )


def _has_long_words(texts: list[str]) -> bool:
    """Return whether a word has more than LONGEST_WORD characters. The pattern that
    removes such words is as slow as training, so it is used only if needed."""
    return any(len(word) > LONGEST_WORD for text in texts for word in text.split())


def without_long_words(words: Any, longest: int) -> pre_tokenizers.Sequence:
    """Return a pre-tokenizer that splits texts like the pre-tokenizer `words` and then
    removes words of more than `longest` characters.

    Training on a word of 500,000 letters (base64, DNA) is extremely slow because the
    whole word is read again for every pair of pieces that is merged.
    """
    longer = Regex(f".{{{longest + 1},}}")
    removed = pre_tokenizers.Split(longer, behavior="removed")
    return pre_tokenizers.Sequence([words, removed])


def sampled(texts: Any) -> Iterator[str]:
    """Yield all texts, or evenly spaced texts if they exceed TRAINING_BYTES."""
    every = max(1, -(-int(texts.nbytes) // TRAINING_BYTES))
    for chunk in texts.chunks:
        yield from chunk.take(np.arange(0, len(chunk), every)).to_pylist()


def _alphabet(texts: list[str], limit: int) -> tuple[list[str], dict[int, None]]:
    """Return the `limit` most frequent characters in `texts`, sorted, and a table for
    `str.translate` that deletes all other characters except whitespace."""
    counts = np.zeros(sys.maxunicode + 1, np.int64)
    for start in range(0, len(texts), COUNTED_TEXTS):
        joined = "".join(texts[start : start + COUNTED_TEXTS]).lower()
        codes = np.frombuffer(joined.encode("utf-32-le"), np.uint32)
        counts += np.bincount(codes, minlength=len(counts))
    found = np.flatnonzero(counts)
    ranked = map(chr, found[np.argsort(-counts[found], kind="stable")].tolist())
    letters = [letter for letter in ranked if not letter.isspace()]
    rare = letters[limit:]
    deleted = {ord(case): None for c in rare for case in (c, *c.upper()) if len(c) == 1}
    return sorted(letters[:limit]), deleted


def _untrained(model: models.WordPiece) -> Tokenizer:
    tokenizer = Tokenizer(model)
    # strip_accents is off, because it would decompose Hangul and drop accents.
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=True, strip_accents=False
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def add_special_tokens_to_ends(tokenizer: Tokenizer) -> Tokenizer:
    """Register the special tokens, make `tokenizer` add [CLS] before and [SEP] after
    each text, and return it."""
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    start, end = SPECIAL_TOKENS[2], SPECIAL_TOKENS[3]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {end} $B:1 {end}:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in (start, end)],
    )
    return tokenizer


def commonest_words(texts: Any, limit: int) -> tuple[list[str], int]:
    """Return the most frequent words in an Arrow column of texts, sorted by frequency,
    and the number of distinct words. `limit` includes the special tokens."""
    counts: Counter[str] = Counter()
    for chunk in texts.chunks:
        found = pc.value_counts(pc.utf8_split_whitespace(chunk).flatten())
        words, numbers = (column.to_pylist() for column in found.flatten())
        counts.update(dict(zip(words, numbers, strict=True)))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return ranked[: limit - len(SPECIAL_TOKENS)], len(ranked)


def word_tokenizer(words: list[str]) -> Tokenizer:
    """Return a tokenizer that splits texts at whitespace. Words that are not in `words`
    are encoded as [UNK]. [CLS] is added before each text, and [SEP] after it."""
    pieces = dict.fromkeys([*SPECIAL_TOKENS, *words])
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return add_special_tokens_to_ends(tokenizer)
