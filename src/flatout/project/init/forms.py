"""Tasks whose rows have columns that other tasks do not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SCORES = ("score", "similarity", "similarity_score", "label")
LOWEST_SCORE = {"embedding": -1, "reranking": 0}
FORMS: tuple[tuple[str, Mapping[str, Sequence[str]]], ...] = (
    ("causal-lm", {"messages_column": ("messages", "conversation", "conversations")}),
    (
        "embedding",
        {
            "anchor_column": ("anchor", "query"),
            "positive_column": ("positive", "pos"),
            "negative_column": ("negative", "negatives", "neg"),
        },
    ),
    (
        "embedding",
        {
            "anchor_column": ("sentence1", "sentence_1", "text1"),
            "positive_column": ("sentence2", "sentence_2", "text2"),
            "label_column": SCORES,
        },
    ),
    (
        "reranking",
        {
            "query_column": ("query", "question"),
            "passage_column": ("passage", "document", "doc"),
            "label_column": SCORES,
        },
    ),
    (
        "causal-lm",
        {
            "prompt_column": ("prompt", "question", "instruction", "input"),
            "completion_column": ("completion", "answer", "response", "output"),
        },
    ),
    (  # a question and its answer; reached only if the user names this task
        "embedding",
        {
            "anchor_column": ("question", "query"),
            "positive_column": ("answer", "passage", "document"),
        },
    ),
    (
        "token-classification",
        {
            "text_column": ("tokens", "words"),
            "label_column": ("ner_tags", "ner", "pos_tags", "tags", "labels"),
        },
    ),
)
"""Tasks that can be detected from the column names. Each entry maps the task's
parameters in `split` to the usual names of the columns. The first entry that matches is
used. Only the column for `negative_column` may be missing."""
