"""Where a text may be cut so that its pieces have the tokens that it has itself.

Most tokenizers cut a text into words before they look for word pieces, and a word's
tokens do not depend on its neighbours. Where the rule of the cut is known, the same
words can be found here and their tokens remembered: text repeats its words.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

GPT2_PATTERN = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|"
    r"\s+(?!\S)|\s+"
)
"""The rule of `ByteLevel` with `use_regex` (Radford et al. 2019)."""
BERT_ASCII = r"[A-Za-z0-9]+|[^A-Za-z0-9\s]"
"""`BertPreTokenizer` on ASCII: words, and each sign by itself (Devlin et al. 2018)."""
BETWEEN_SPACES = r"\S+"

UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f\x85]")
"""Control characters: white space to Python, deleted or kept by tokenizers."""

MANY = 16

_HARMLESS = frozenset({"BertNormalizer", "Lowercase", "StripAccents"})
"""Normalizers that look at one character at a time, or at marks beside it."""
_IDENTITY_ON_ASCII = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_CLASS = re.compile(r"\[(?:\\.|[^\]\\])*\]")
_UNCERTAIN = re.compile(
    r"\\(?!p\{[LN]\}|[srnStx])"  # other classes and anchors
    r"|\(\?(?!i:|:|!\\S\))"  # looking around, but for the end of white space
    r"|\$|(?<!\[)\^"
)


@dataclass(frozen=True)
class Splitter:
    """Regular expressions whose matches are the pieces; None: unknown for such text."""

    ascii: re.Pattern[str] | None
    other: re.Pattern[str] | None
    lowers: bool = False
    """Upper case has the tokens of lower case, so ASCII may be lowered beforehand."""
    special: re.Pattern[str] = UNSAFE
    """Finds what reaches over the bounds of pieces: special tokens, or what might be
    one, and control characters."""
    special_lowered: re.Pattern[str] | None = None
    """The same in lowered text, for tokens that are looked for there."""

    def is_safe(self, text: str) -> bool:
        """Whether nothing in `text` reaches over the bounds of pieces."""
        if self.special.search(text):
            return False
        lowered = self.special_lowered
        return lowered is None or not lowered.search(text.lower())

    def pieces(self, text: str) -> list[str] | None:
        """Pieces of a safe text; None where the rule is not known for it."""
        if not text.isascii():
            return None if self.other is None else self.other.findall(text)
        if self.ascii is None:
            return None
        return self.ascii.findall(text.lower() if self.lowers else text)


def splitter_for(tokenizer: Any) -> Splitter | None:
    """The rule of a `tokenizers.Tokenizer`; None where it is not a known one."""
    if getattr(tokenizer.model, "dropout", None):
        return None
    added = list(tokenizer.get_added_tokens_decoder().values())
    if any(re.search(r"\s", token.content) for token in added):
        return None
    normalizers = _parts(tokenizer.normalizer, "normalizers")
    kinds = {part["type"] for part in normalizers}
    if not kinds <= _HARMLESS | _IDENTITY_ON_ASCII:
        return None
    splitter = _splitter(
        _parts(tokenizer.pre_tokenizer, "pretokenizers"),
        only_ascii=bool(kinds & _IDENTITY_ON_ASCII),
        lowers=any(p["type"] == "Lowercase" or p.get("lowercase") for p in normalizers),
    )
    if splitter is None:
        return None
    exact = [token.content for token in added if not token.normalized]
    lowered = [token.content.lower() for token in added if token.normalized]
    return replace(
        splitter,
        special=re.compile("|".join([UNSAFE.pattern, *_guards(exact)])),
        special_lowered=re.compile("|".join(_guards(lowered))) if lowered else None,
    )


def _guards(contents: list[str]) -> list[str]:
    """Expressions for tokens; where there are many, for how they begin."""
    few = contents if len(contents) <= MANY else [text[:2] for text in contents]
    return [re.escape(text) for text in dict.fromkeys(few)]


def _parts(component: Any, inside: str) -> list[dict[str, Any]]:
    """A component of the tokenizer as a list of its settings; empty without one."""
    if component is None:
        return []
    state: dict[str, Any] = json.loads(component.__getstate__())
    parts: list[dict[str, Any]] = state[inside] if inside in state else [state]
    return parts


def _splitter(
    parts: list[dict[str, Any]], only_ascii: bool, lowers: bool
) -> Splitter | None:
    between = None if only_ascii else re.compile(BETWEEN_SPACES)
    match [part["type"] for part in parts]:
        case ["BertPreTokenizer"]:
            return Splitter(re.compile(BERT_ASCII), between, lowers)
        case ["Whitespace"] | ["WhitespaceSplit"]:
            return Splitter(re.compile(BETWEEN_SPACES), between, lowers)
        case ["ByteLevel"] if not _prefixes(parts[0]) and parts[0]["use_regex"]:
            return Splitter(on_ascii(GPT2_PATTERN), None)
        case ["Split", "ByteLevel"] if not _prefixes(parts[1]):
            return _by_pattern(parts[0], parts[1])
    return None


def _prefixes(part: dict[str, Any]) -> bool:
    return bool(part.get("add_prefix_space"))


def _by_pattern(split: dict[str, Any], byte_level: dict[str, Any]) -> Splitter | None:
    """Of tokenizers that bring their own rule (Llama 3, Qwen)."""
    pattern = split["pattern"].get("Regex")
    usual = split["behavior"] == "Isolated" and not split["invert"]
    if pattern is None or not usual or byte_level["use_regex"]:
        return None
    return Splitter(on_ascii(pattern), None)


def on_ascii(pattern: str) -> re.Pattern[str] | None:
    """A rule with Unicode classes as one that does the same on ASCII text; None where
    it has parts whose meaning here is not certain."""
    if _UNCERTAIN.search(pattern):
        return None
    inside = _CLASS.sub(lambda found: _in_class(found[0]), pattern)
    plain = inside.replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]")
    try:
        return re.compile(plain)
    except re.error:
        return None


def _in_class(text: str) -> str:
    return text.replace(r"\p{L}", "A-Za-z").replace(r"\p{N}", "0-9")
