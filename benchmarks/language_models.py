"""Train Qwen3-0.6B with random weights: flatout, the Trainer, and a packed loop.
The LoRA case adapts all linear layers of the blocks, and also measures peft.

    python -m benchmarks.language_models
    python -m benchmarks.language_models --small --turns 1
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks import training
from benchmarks.harness import Figures, Script, Side, main
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
    "96 tokens, batch 256": Shape(QWEN3, 256, 96, token_budget=32_768, warm_steps=12),
    "1,200 tokens, batch 16": Shape(
        QWEN3, 16, 1_200, 2_048, token_budget=32_768, steps=40, warm_steps=12
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

LORA, RANK = "LoRA, 96 tokens, batch 256", 16
LORA_SHAPE = replace(
    SHAPES["96 tokens, batch 256"],
    micro_batch=128,
    token_budget=12_288,  # the same number of tokens as in 128 rows
)


def shape_of(given: argparse.Namespace) -> Shape:
    shape = LORA_SHAPE if given.case == LORA else SHAPES[given.case]
    if not given.small:
        return shape
    rows = {"batch": 8, "mean_tokens": 48, "longest": 128, "token_budget": "auto"}
    steps = {"steps": 4, "warm_steps": 2, "micro_batch": None}
    return replace(shape, config=SMALL, **rows, **steps)


def model_of(given: argparse.Namespace) -> Any:
    """Return a model with random weights. In the LoRA case, it has a peft adapter, and
    on a GPU the base model is in bf16, as is usual."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = shape_of(given)
    config = AutoConfig.for_model(**shape.config, max_position_embeddings=shape.longest)
    model = AutoModelForCausalLM.from_config(config)
    if given.case != LORA:
        return model
    from peft import LoraConfig, TaskType, get_peft_model

    kind = TaskType.CAUSAL_LM
    lora = LoraConfig(r=RANK, target_modules="all-linear", task_type=kind)
    return get_peft_model(model.to(torch.bfloat16) if training.IS_CUDA else model, lora)


def flatout(given: argparse.Namespace) -> Figures:
    return training.flatout(shape_of(given), "causal-lm")


def flatout_lora(given: argparse.Namespace) -> Figures:
    base = argparse.Namespace(**{**vars(given), "case": next(iter(SHAPES))})
    with tempfile.TemporaryDirectory(prefix="base-") as name:
        model_of(base).save_pretrained(name)
        model = {"name_or_path": name, "config": {}, "lora": {"rank": RANK}}
        return training.flatout(shape_of(given), "causal-lm", model=model)


def loop(given: argparse.Namespace) -> Figures:
    return packed_loop(shape_of(given), model_of(given))


def rebalanced(given: argparse.Namespace) -> Figures:
    collator = training.padding_collator(causal=True)
    flags = {"train_sampling_strategy": "batch_rebalance"}
    return training.trainer(shape_of(given), model_of(given), collator, **flags)


def flattened(
    given: argparse.Namespace, *, flash_4: bool = True, **flags: Any
) -> Figures:
    """Train without padding, with Liger's kernels if liger-kernel is installed and the
    model is not compiled. If `flash_4` is True and flash-attn-4 is installed, attention
    is transformers' FlashAttention 4, otherwise PyTorch's flash attention."""
    from transformers import DataCollatorWithFlattening
    from transformers.utils import is_flash_attn_4_available

    model = model_of(given)
    base = model.get_base_model() if given.case == LORA else model
    flash = "flash_attention_4" if flash_4 and is_flash_attn_4_available() else ""
    base.set_attn_implementation(flash or training.register_packed_attention())
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    liger = bool(find_spec("liger_kernel") and training.IS_CUDA and not flags)
    flags["use_liger_kernel"] = liger
    found = training.trainer(shape_of(given), model, collator, **flags)
    return {**found, "liger": liger, "attention": flash or "PyTorch"}


SIDES: dict[str, Side] = {
    "flatout": flatout,
    "packed loop": loop,
    "Trainer, flattened": flattened,
    "Trainer, batch_rebalance": rebalanced,
}
if training.IS_CUDA:
    compiled = partial(flattened, torch_compile=True)
    SIDES["Trainer, flattened, compiled"] = compiled
    SIDES["Trainer, flattened, compiled, PyTorch"] = partial(compiled, flash_4=False)
LORA_SIDES: dict[str, Side] = {
    "flatout": flatout_lora,
    "peft, Trainer, flattened": flattened,
    "peft, Trainer, batch_rebalance": rebalanced,
}
SCRIPT = Script(
    "benchmarks.language_models",
    "Qwen3-0.6B's shape compared with the Trainer and a packed loop",
    {**dict.fromkeys(SHAPES, SIDES), LORA: LORA_SIDES},
    small_cases=("96 tokens, batch 256", LORA),
)

if __name__ == "__main__":
    raise SystemExit(main(SCRIPT))
