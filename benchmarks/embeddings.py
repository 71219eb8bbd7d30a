"""Compare the training of embedding models and rerankers with sentence-transformers.

    python -m benchmarks.embeddings
    python -m benchmarks.embeddings --small --turns 1

Both libraries train with the same loss on the same pairs: a question of about 24 tokens
and a passage of about 92. The negatives are all other passages in the global batch. The
trainer of sentence-transformers tokenizes in its loader's workers, as it always does.
It trains on rows in random order and without micro-batches, because smaller batches
have fewer negatives. A reranker reads a question and a passage as one row.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from benchmarks import training
from benchmarks.encoders import BERT, SMALL
from benchmarks.harness import Figures, Script, main
from benchmarks.training import FIRST_ID, IS_CUDA, Shape, Stopwatch

SIX_LAYERS = {
    **BERT,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
SHAPES = {
    "6 layers, batch 512": Shape(SIX_LAYERS, 512, token_budget=65_536, steps=100),
    "BERT-base, batch 512": Shape(BERT, 512, token_budget=65_536),
    "reranker, BERT-base, batch 256": Shape(BERT, 256, longest=384, steps=40),
}
TEMPERATURE = 0.05
FLAGS = {"torch_compile": IS_CUDA, "dataloader_num_workers": 8 if IS_CUDA else 0}
"""Additional flags of sentence-transformers, whose loader tokenizes."""
QUESTION_TOKENS, LONGEST_QUESTION = 24, 64


def shape_of(given: argparse.Namespace) -> Shape:
    shape = SHAPES[given.case]
    if not given.small:
        return shape
    small = {"batch": 32, "steps": 8, "warm_steps": 4, "token_budget": "auto"}
    return replace(shape, config=SMALL, **small)


def pair_table(shape: Shape) -> pa.Table:
    """Return pairs in flatout's format: the tokens and the lengths of both texts."""
    short = replace(shape, mean_tokens=QUESTION_TOKENS, longest=LONGEST_QUESTION)
    sides = [
        training.token_table(one)["input_ids"].to_pylist() for one in (short, shape)
    ]
    pairs = list(zip(*sides, strict=True))
    columns = {
        "input_ids": [question + passage for question, passage in pairs],
        "sequence_lengths": [[len(a), len(b)] for a, b in pairs],
    }
    lists = {name: pa.array(v, pa.list_(pa.int32())) for name, v in columns.items()}
    return pa.table(lists)


def flatout(given: argparse.Namespace) -> Figures:
    shape = shape_of(given)
    model = {"temperature": TEMPERATURE, "pooling": "mean"}
    return training.flatout(shape, "embedding", pair_table(shape), model=model)


def text_pairs(shape: Shape) -> Any:
    """Return the pairs of `pair_table` as a `datasets.Dataset` of texts. Each word
    stands for one token."""
    from datasets import Dataset

    words = np.array([f"w{number}" for number in range(shape.vocabulary)])
    table = pair_table(shape).to_pydict()
    columns: dict[str, list[str]] = {"anchor": [], "positive": []}
    pairs = zip(table["input_ids"], table["sequence_lengths"], strict=True)
    for ids, (question, _) in pairs:
        columns["anchor"].append(" ".join(words[ids[:question]]))
        columns["positive"].append(" ".join(words[ids[question:]]))
    return Dataset.from_dict(columns)


def save_model(shape: Shape, folder: Path, auto: Any, **config: Any) -> None:
    """Save a model with random weights, and a tokenizer for the words of `text_pairs`.
    `auto` is the model's auto class, and `config` are additional config entries."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, PreTrainedTokenizerFast

    torch.manual_seed(0)
    auto.from_config(AutoConfig.for_model(**shape.config, **config)).save_pretrained(
        folder
    )
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = names + [f"w{number}" for number in range(FIRST_ID, shape.vocabulary)]
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(zip(["pad_token", "unk_token"], names, strict=False))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=shape.longest, **special
    ).save_pretrained(folder)


def measured(
    shape: Shape, model: Any, trainer: Any, arguments: Any, rows: Any, loss: Any
) -> Figures:
    """Train `model` with a trainer class of sentence-transformers and its `arguments`
    class, and return the throughput."""
    flags, watch = {**training.best_flags(shape), **FLAGS}, Stopwatch(shape)
    with tempfile.TemporaryDirectory(prefix="sentences-") as name:
        given = {"train_dataset": rows, "loss": loss}
        clock = training.clock(watch)
        trainer(model, arguments(name, **flags), **given, callbacks=[clock]).train()
    return watch.figures()


def peer(given: argparse.Namespace) -> Figures:
    import sentence_transformers as st
    from sentence_transformers.sentence_transformer import losses
    from transformers import AutoModel

    shape = shape_of(given)
    with tempfile.TemporaryDirectory(prefix="sentences-") as name:
        save_model(shape, Path(name), AutoModel)
        model = st.SentenceTransformer(name, device=training.DEVICE.type)
    kinds = st.SentenceTransformerTrainer, st.SentenceTransformerTrainingArguments
    loss = losses.MultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE)
    return measured(shape, model, *kinds, text_pairs(shape), loss)


def passages_of(shape: Shape) -> Shape:
    """Return `shape` with a smaller maximum length, which leaves room for a question in
    the same row."""
    return replace(shape, longest=shape.longest - LONGEST_QUESTION)


def rank_table(shape: Shape) -> pa.Table:
    """Return rows of a question and a passage. Their labels are pairs of a relevance (0
    or 1) and the number of the question."""
    pairs = pair_table(passages_of(shape))
    chance = np.random.default_rng(0)
    labels = np.stack([chance.integers(0, 2, len(pairs)), np.arange(len(pairs)) // 4])
    found = pa.FixedSizeListArray.from_arrays(labels.T.astype(np.float32).ravel(), 2)
    return pa.table({"input_ids": pairs["input_ids"], "labels": found})


def reranker(given: argparse.Namespace) -> Figures:
    shape = shape_of(given)
    return training.flatout(shape, "reranking", rank_table(shape))


def reranker_peer(given: argparse.Namespace) -> Figures:
    from sentence_transformers import cross_encoder as ce
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
    from transformers import AutoModelForSequenceClassification

    shape = shape_of(given)
    pairs = text_pairs(passages_of(shape))
    with tempfile.TemporaryDirectory(prefix="sentences-") as name:
        save_model(shape, Path(name), AutoModelForSequenceClassification, num_labels=1)
        model = ce.CrossEncoder(name, device=training.DEVICE.type)
    kinds = ce.CrossEncoderTrainer, ce.CrossEncoderTrainingArguments
    rows = pairs.add_column("label", [float(n % 2) for n in range(len(pairs))])
    return measured(shape, model, *kinds, rows, BinaryCrossEntropyLoss(model))


EMBEDDINGS = {"flatout": flatout, "sentence-transformers, compiled": peer}
RERANKERS = {"flatout": reranker, "sentence-transformers, compiled": reranker_peer}
SCRIPT = Script(
    "benchmarks.embeddings",
    "embeddings and rerankers compared with sentence-transformers",
    {name: RERANKERS if "reranker" in name else EMBEDDINGS for name in SHAPES},
    small_cases=("BERT-base, batch 512", "reranker, BERT-base, batch 256"),
)

if __name__ == "__main__":
    raise SystemExit(main(SCRIPT))
