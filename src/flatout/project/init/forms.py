"""Guess of the task that fits a file, by the form of each task's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, permutations

from flatout.project.init.first_look import (
    ColumnValues,
    FirstLook,
    Guessed,
    all_are,
    are_prose,
    are_texts,
    is_list_of_texts,
    is_number,
    named,
    num_classes,
)

PROMPTS = ("prompt", "question", "instruction", "input")
COMPLETIONS = ("completion", "answer", "response", "output")
SENTENCES = (("sentence1", "sentence_1", "text1"), ("sentence2", "sentence_2", "text2"))
SCORES = ("score", "similarity", "similarity_score", "label")
QUERIES = ("query", "question")
PASSAGES = ("passage", "document", "doc")
ANCHORS = ("anchor", "query")
POSITIVES = ("positive", "pos")
NEGATIVES = ("negative", "negatives", "neg")


def _chats(look: FirstLook) -> Guessed | None:
    for name, values in look.columns.items():
        turns = values[0]
        if isinstance(turns, list) and turns and isinstance(turns[0], dict):
            if {"role", "content"} <= turns[0].keys():
                texts = [" ".join(str(t.get("content")) for t in v) for v in values]
                split = {"messages_column": name, "label_column": None}
                why = f"{name} holds messages with role and content"
                return Guessed(split, why, texts)
    return None


def _pairs(look: FirstLook) -> Guessed | None:
    columns = look.columns
    texts = [name for name, values in columns.items() if are_texts(values)]
    anchor, positive = named(texts, ANCHORS), named(texts, POSITIVES)
    if anchor is None or positive is None:
        return None
    split = {"anchor_column": anchor, "positive_column": positive}
    if negative := named(list(columns), NEGATIVES):
        split["negative_column"] = negative
    why = f"{positive} belongs to {anchor}"
    return Guessed({**split, "label_column": None}, why, columns[positive])


def _scored_pairs(look: FirstLook) -> Guessed | None:
    """Find two sentences and a number from -1 to 1 that is not only 0 or 1."""
    columns = look.columns
    one, other = (named(list(columns), names) for names in SENTENCES)
    score = named(list(columns), SCORES)
    if one is None or other is None or score is None:
        return None
    values = columns[score]
    if not all_are(values, is_number) or {float(v) for v in values} <= {0, 1}:
        return None
    if not all_are(values, lambda v: -1 <= float(v) <= 1):
        return None
    split = {"anchor_column": one, "positive_column": other, "label_column": score}
    return Guessed(split, f"{score} scores {one} and {other}", columns[other])


def _rankings(look: FirstLook) -> Guessed | None:
    """Find a query, a passage and a score from 0 to 1."""
    columns = look.columns
    texts = [name for name, values in columns.items() if are_texts(values)]
    query, passage = named(texts, QUERIES), named(texts, PASSAGES)
    score = named(list(columns), SCORES)
    if query is None or passage is None or score is None:
        return None
    if not all_are(columns[score], lambda v: is_number(v) and 0 <= float(v) <= 1):
        return None
    split = {"query_column": query, "passage_column": passage, "label_column": score}
    both = [f"{one} {other}" for one, other in look.pairs(query, passage)]
    return Guessed(split, f"{score} scores {passage} for {query}", both)


def _completions(look: FirstLook) -> Guessed | None:
    columns = look.columns
    texts = [name for name, values in columns.items() if are_texts(values)]
    prompt, completion = named(texts, PROMPTS), named(texts, COMPLETIONS)
    if prompt is None or completion is None or not are_prose(columns[prompt]):
        return None
    if not (pairs := look.pairs(prompt, completion)):
        return None
    split = {
        "prompt_column": prompt,
        "completion_column": completion,
        "label_column": None,
    }
    joined = [f"{one} {other}" for one, other in pairs]
    return Guessed(split, f"{completion} completes {prompt}", joined)


def _tags(look: FirstLook) -> Guessed | None:
    """Find two columns of lists of equal length in every row: words, and tags with
    fewer different values."""
    columns = look.columns
    lists = [n for n, values in columns.items() if all_are(values, is_list_of_texts)]
    for words, tags in permutations(lists, 2):
        pairs = look.pairs(words, tags)
        same = pairs and all(len(one) == len(other) for one, other in pairs)
        if same and _distinct(columns[tags]) < _distinct(columns[words]):
            texts = [" ".join(row) for row in columns[words]]
            split = {"text_column": words, "label_column": tags}
            return Guessed(split, f"{tags} has a tag for each word of {words}", texts)
    return None


def _distinct(rows: Sequence[Sequence[str]]) -> int:
    return len(set(chain.from_iterable(rows)))


def _several(columns: ColumnValues) -> Guessed | None:
    """Find a column of lists, else at least two columns of 0 and 1."""
    for name, values in columns.items():
        if all_are(values, is_list_of_texts):
            return Guessed({"label_column": name}, f"{name} holds lists of labels")
    names = [n for n, v in columns.items() if {str(x) for x in v} == {"0", "1"}]
    if len(names) < 2:
        return None
    split = {"label_columns": names, "label_column": None}
    return Guessed(split, f"{', '.join(names)} are 0 or 1")


def _classes(columns: ColumnValues) -> Guessed | None:
    """Find a column with few values and several rows for each."""
    for name, values in columns.items():
        if count := num_classes(values):
            why = f"{name} has {count} classes in the first {len(values):,} rows"
            return Guessed({"label_column": name}, why)
    return None


def _numbers(columns: ColumnValues) -> Guessed | None:
    """Find a column of numbers that are not row numbers."""
    for name, values in columns.items():
        is_id = name.strip().casefold() in ("id", "index", "") or name.endswith("_id")
        if all_are(values, is_number) and not is_id:
            return Guessed({"label_column": name}, f"{name} holds numbers")
    return None


BY_ROWS: tuple[tuple[str, Callable[[FirstLook], Guessed | None]], ...] = (
    ("causal-lm", _chats),
    ("embedding", _pairs),
    ("embedding", _scored_pairs),
    ("reranking", _rankings),
    ("causal-lm", _completions),
    ("token-classification", _tags),
)
"""Tasks whose rows have a form that no other task reads."""
BY_LABEL: tuple[tuple[str, Callable[[ColumnValues], Guessed | None]], ...] = (
    ("multi-label-classification", _several),
    ("sequence-classification", _classes),
    ("regression", _numbers),
)
"""Tasks by a column of labels; the first match is used."""
UNLABELLED = "masked-lm"
