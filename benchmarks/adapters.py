"""LoRA on a model of Qwen3-0.6B's shape, compared with peft and transformers' Trainer.

    python -m benchmarks.adapters
    python -m benchmarks.adapters --small --turns 1

The base model has random weights. All programs adapt all linear layers of the blocks.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from benchmarks import language_models, training
from benchmarks.harness import Figures, Script, main
from benchmarks.training import Shape

RANK = 16
SHAPES = {
    "96 tokens, batch 256": replace(
        language_models.SHAPES["96 tokens, batch 256"],
        micro_batch=128,
        token_budget=12_288,  # the same number of tokens as in 128 rows
    )
}


def shape_of(given: argparse.Namespace) -> Shape:
    shape = SHAPES[given.case]
    if not given.small:
        return shape
    rows = {"batch": 8, "mean_tokens": 48, "longest": 128, "token_budget": "auto"}
    small = {"steps": 4, "warm_steps": 2, "micro_batch": None}
    return replace(shape, config=language_models.SMALL, **rows, **small)


def flatout(given: argparse.Namespace) -> Figures:
    shape = shape_of(given)
    table = training.token_table(shape, labels=False)
    with tempfile.TemporaryDirectory(prefix="base-") as name:
        language_models.model_of(shape).save_pretrained(name)
        model = {"name_or_path": name, "config": {}, "lora": {"rank": RANK}}
        return training.flatout(shape, "causal-lm", table, model)


def adapted(shape: Shape) -> Any:
    """Return the model with peft's adapter. On a GPU, the base is in bf16 as usual."""
    import torch
    from peft import LoraConfig, TaskType, get_peft_model

    model = language_models.model_of(shape)
    model = model.to(torch.bfloat16) if training.IS_CUDA else model
    config = LoraConfig(
        r=RANK, target_modules="all-linear", task_type=TaskType.CAUSAL_LM
    )
    return get_peft_model(model, config)


def trainer(given: argparse.Namespace) -> Figures:
    shape = shape_of(given)
    table = training.token_table(shape, labels=False)
    collator = training.padding_collator(causal=True)
    flags = {"train_sampling_strategy": "batch_rebalance"}
    return training.trainer(shape, adapted(shape), table, collator, **flags)


def trainer_flattened(given: argparse.Namespace) -> Figures:
    """Train without padding, and with Liger's kernels if liger-kernel is installed."""
    from transformers import DataCollatorWithFlattening

    shape, liger = shape_of(given), find_spec("liger_kernel") is not None
    model = adapted(shape)
    model.get_base_model().set_attn_implementation(training.register_packed_attention())
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    table = training.token_table(shape, labels=False)
    flags = {"use_liger_kernel": liger and training.IS_CUDA}
    found = training.trainer(shape, model, table, collator, **flags)
    return {**found, "liger": flags["use_liger_kernel"]}


SIDES = {
    "flatout": flatout,
    "peft, Trainer, flattened": trainer_flattened,
    "peft, Trainer, batch_rebalance": trainer,
}
SCRIPT = Script(
    "benchmarks.adapters",
    "LoRA compared with peft and the Trainer",
    dict.fromkeys(SHAPES, SIDES),
)

if __name__ == "__main__":
    raise SystemExit(main(SCRIPT))
