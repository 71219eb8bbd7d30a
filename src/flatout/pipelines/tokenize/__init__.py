"""Train or load a tokenizer, and tokenize the three splits."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from flatout.engine.tokenizing.token_recipes import label_names_of
from flatout.pipelines import SPLITS
from flatout.pipelines.tokenize.nodes import (
    describe_tokens,
    encode_rows,
    make_tokenizer,
)

PARAMETERS = ["params:model", "params:tokenize"]


def create_pipeline(**_: Any) -> Pipeline:
    rows, tokens = (
        [f"{split}_{kind}" for split in SPLITS] for kind in ("rows", "tokens")
    )
    made, views = ["train_rows", *PARAMETERS], ["tokenizer", "tokenizer_file"]
    encoded = [*rows, "tokenizer_file", "label_names", *PARAMETERS]
    described = [*tokens, "params:tokenize.max_length"]
    names, reports = "label_names", ["token_report", "token_figure"]
    return Pipeline(
        [
            Node(make_tokenizer, made, views, name="make_tokenizer"),
            Node(label_names_of, "train_rows", names, name="collect_label_names"),
            Node(encode_rows, encoded, tokens, name="encode_rows"),
            Node(describe_tokens, described, reports, name="describe_tokens"),
        ]
    )
