"""Train BERT and ModernBERT: flatout, the Trainer, and a packed loop. On a CPU, no
program is compiled.

    python -m benchmarks.encoders
    python -m benchmarks.encoders --small --turns 1

The Trainer reads its rows in random order, or balances batches with `batch_rebalance`,
which keeps the order of steps random. It does not sort rows by length, because sorting
is faster but harms learning.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks import training
from benchmarks.harness import Figures, Script, Side, main
from benchmarks.packed_loop import packed_loop
from benchmarks.training import DEVICE, IS_CUDA, LABELS, Shape
from flatout.engine.machine.runtime import fast_bf16

BERT = {"model_type": "bert", "vocab_size": 30_522}


def bert(width: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": 4 * width}
    depth = {"num_hidden_layers": layers, "num_attention_heads": heads}
    return {**BERT, **sizes, **depth}


SMALL = bert(64, 2, 2)
MODERNBERT = {"model_type": "modernbert", "vocab_size": 50_368}
SHAPES = {
    "batch 16": Shape(BERT, 16, steps=200, warm_steps=100),
    "batch 256": Shape(BERT, 256, steps=40),
    # With a larger micro-batch, the Trainer runs out of memory on an 80 GB GPU.
    "batch 704": Shape(BERT, 704, token_budget=65_536, micro_batch=352),
    "ModernBERT-base's shape, 1,200 tokens, batch 32": Shape(
        MODERNBERT, 32, 1_200, 2_048, token_budget=65_536, warm_steps=12
    ),
    # These cases suit CPUs. The first one trains the default model of `kedro run`.
    "2 layers of size 128, batch 16": Shape(bert(128, 2, 2), 16, steps=80),
    "6 layers of size 384, batch 16": Shape(
        bert(384, 6, 12), 16, steps=40, bf16=IS_CUDA or fast_bf16(DEVICE)
    ),
}


def shape_of(given: argparse.Namespace) -> Shape:
    shape = SHAPES[given.case]
    if not given.small:
        return shape
    batch, micro = min(16, shape.batch), None if shape.micro_batch is None else 8
    small = {"batch": batch, "micro_batch": micro, "steps": 8, "warm_steps": 4}
    return replace(shape, config=SMALL, token_budget="auto", **small)


def _model(shape: Shape) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = AutoConfig.for_model(**shape.config, num_labels=LABELS)
    return AutoModelForSequenceClassification.from_config(config)


def flatout(given: argparse.Namespace) -> Figures:
    return training.flatout(shape_of(given), "sequence-classification")


def _trainer(given: argparse.Namespace, **flags: Any) -> Figures:
    shape = shape_of(given)
    collator = training.padding_collator(causal=False)
    return training.trainer(shape, _model(shape), collator, **flags)


def loop(given: argparse.Namespace) -> Figures:
    shape = shape_of(given)
    return packed_loop(shape, _model(shape))


REBALANCED = {"train_sampling_strategy": "batch_rebalance"}
SIDES: dict[str, Side] = {
    "flatout": flatout,
    "packed loop": loop,
    "Trainer, random order": _trainer,
    "Trainer, batch_rebalance": partial(_trainer, **REBALANCED),
}
if IS_CUDA:
    compiled = partial(_trainer, **REBALANCED, torch_compile=True)
    SIDES["Trainer, batch_rebalance, compiled"] = compiled
SCRIPT = Script(
    "benchmarks.encoders",
    "BERT-base compared with the Trainer and a packed loop",
    dict.fromkeys(SHAPES, SIDES),
    small_cases=("batch 16",),
)

if __name__ == "__main__":
    raise SystemExit(main(SCRIPT))
