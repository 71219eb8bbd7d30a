"""Wiring of the tokenize pipeline."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.pipelines.tokenize.nodes import (
    collect_label_names,
    describe_tokens,
    encode_rows,
    make_tokenizer,
)

ROWS = ["train_rows", "validation_rows", "test_rows"]
TOKENS = ["train_tokens", "validation_tokens", "test_tokens"]
PARAMETERS = ["params:model", "params:tokenize"]


def create_pipeline(**_: Any) -> Pipeline:
    return Pipeline(
        [
            Node(
                func=make_tokenizer,
                inputs=["train_rows", *PARAMETERS],
                outputs=["tokenizer", "tokenizer_file"],
                name="make_tokenizer",
            ),
            Node(
                func=collect_label_names,
                inputs="train_rows",
                outputs="label_names",
                name="collect_label_names",
            ),
            Node(
                func=encode_rows,
                inputs=[*ROWS, "tokenizer_file", "label_names", *PARAMETERS],
                outputs=TOKENS,
                name="encode_rows",
            ),
            Node(
                func=describe_tokens,
                inputs=[*TOKENS, "tokenizer_file", "params:tokenize"],
                outputs=["token_report", "token_figure"],
                name="describe_tokens",
            ),
        ]
    )
