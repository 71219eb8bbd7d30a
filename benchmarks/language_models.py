"""Train Qwen3-0.6B with random weights: flatout, the Trainer, and a packed loop.

    python -m benchmarks.language_models
    python -m benchmarks.language_models --small --turns 1

The flattened Trainer has no padding, and uses Liger's kernels if liger-kernel is
installed.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from benchmarks import training
from benchmarks.harness import Figures, Script, main
from benchmarks.packed_loop import packed_loop
from benchmarks.training import Shape

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "tie_word_embeddings": True,
}
SMALL = {
    **QWEN3,
    "vocab_size": 1_000,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 128,
}
SHAPES = {
    "96 tokens, batch 256": Shape(
        QWEN3, 256, 96, token_budget=32_768, steps=8, warm_steps=12
    ),
    "1,200 tokens, batch 16": Shape(
        QWEN3, 16, 1_200, 2_048, token_budget=32_768, steps=8, warm_steps=12
    ),
    "blocks of 8,192 tokens, batch 8": Shape(
        QWEN3,
        8,
        mean_tokens=1_000_000,  # every row is a full block
        longest=8_192,
        token_budget=32_768,
        steps=8,
        warm_steps=12,
        micro_batch=4,
    ),
}


def shape_of(given: argparse.Namespace) -> Shape:
    shape = SHAPES[given.case]
    if not given.small:
        return shape
    rows = {"batch": 8, "mean_tokens": 48, "longest": 128, "token_budget": "auto"}
    steps = {"steps": 4, "warm_steps": 2, "micro_batch": None}
    return replace(shape, config=SMALL, **rows, **steps)


def model_of(shape: Shape) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**shape.config, max_position_embeddings=shape.longest)
    return AutoModelForCausalLM.from_config(config)


def flatout(given: argparse.Namespace) -> Figures:
    shape = shape_of(given)
    table = training.token_table(shape, labels=False)
    return training.flatout(shape, "causal-lm", table)


def loop(given: argparse.Namespace) -> Figures:
    shape = shape_of(given)
    table = training.token_table(shape, labels=False)
    return packed_loop(shape, model_of(shape), table)


def trainer_rebalanced(given: argparse.Namespace) -> Figures:
    shape = shape_of(given)
    table = training.token_table(shape, labels=False)
    collator = training.padding_collator(causal=True)
    rebalanced = {"train_sampling_strategy": "batch_rebalance"}
    return training.trainer(shape, model_of(shape), table, collator, **rebalanced)


def trainer_flattened(given: argparse.Namespace, **flags: Any) -> Figures:
    from transformers import DataCollatorWithFlattening

    shape, liger = shape_of(given), find_spec("liger_kernel") is not None
    model = model_of(shape)
    model.set_attn_implementation(training.register_packed_attention())
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    table = training.token_table(shape, labels=False)
    uses_liger = liger and training.IS_CUDA and not flags
    flags["use_liger_kernel"] = uses_liger
    found = training.trainer(shape, model, table, collator, **flags)
    return {**found, "liger": uses_liger}


def trainer_flattened_compiled(given: argparse.Namespace) -> Figures:
    return trainer_flattened(given, torch_compile=training.IS_CUDA)


SIDES = {
    "flatout": flatout,
    "packed, compiled loop": loop,
    "Trainer, flattened": trainer_flattened,
    "Trainer, flattened, compiled": trainer_flattened_compiled,
    "Trainer, batch_rebalance": trainer_rebalanced,
}
SCRIPT = Script(
    "benchmarks.language_models",
    "Qwen3-0.6B's shape compared with the Trainer and a packed loop",
    dict.fromkeys(SHAPES, SIDES),
    small_cases=("96 tokens, batch 256",),
)

if __name__ == "__main__":
    raise SystemExit(main(SCRIPT))
