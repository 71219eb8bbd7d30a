"""Tiny models of every family with a packed path, and token rows for them."""

from __future__ import annotations

import pyarrow as pa
import torch

from flatout.engine.batching import GlobalBatches, Planner
from flatout.engine.building import Vocabulary, build
from flatout.engine.collation import Collator, StepRows
from flatout.engine.heads import DECODERS
from flatout.engine.model import TaskModel
from flatout.engine.settings import ModelSettings
from flatout.engine.tokens import TokenRows

VOCABULARY = Vocabulary(100, 0, mask_token_id=4, special_token_ids=(0, 1, 2, 3, 4))
MAX_LENGTH = 24
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS = {
    "bert": {**SIZES, "intermediate_size": 32},
    "roberta": {**SIZES, "intermediate_size": 32},
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "modernbert": {**SIZES, "intermediate_size": 32, "local_attention": 8},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "llama": {**SIZES, "intermediate_size": 32, "num_key_value_heads": 1},
    "mistral": {**SIZES, "intermediate_size": 32, "num_key_value_heads": 1}
    | {"sliding_window": 6, "head_dim": 8},
    "qwen2": {**SIZES, "intermediate_size": 32, "num_key_value_heads": 1},
    "qwen3": {**SIZES, "intermediate_size": 32, "num_key_value_heads": 1}
    | {"head_dim": 8},
}
LABEL_NAMES = ["a", "b", "c"]


def no_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def token_rows(task: str, count: int = 24) -> TokenRows:
    """Rows of 3 to 24 tokens; labels where the task has one a row."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(3, MAX_LENGTH + 1, (count,), generator=generator).tolist()
    rows = [
        [1, *torch.randint(5, 100, (n - 2,), generator=generator).tolist(), 2]
        for n in lengths
    ]
    columns = {"input_ids": pa.array(rows, pa.list_(pa.int32()))}
    if task == "sequence-classification":
        columns["labels"] = pa.array([n % 3 for n in range(count)], pa.int64())
    if task == "regression":
        columns["labels"] = pa.array([n / 7 for n in range(count)], pa.float64())
    return TokenRows(pa.table(columns))


def task_model(
    family: str, task: str, implementation: str, whole: bool = False
) -> TaskModel:
    torch.manual_seed(0)
    settings = ModelSettings(
        task=task, config={"model_type": family, **CONFIGS[family]}
    )
    names = LABEL_NAMES if task == "sequence-classification" else []
    model = build(settings, VOCABULARY, names, MAX_LENGTH, implementation)
    return TaskModel(no_dropout(model), task, MAX_LENGTH, whole=whole)


def step_rows(family: str, task: str, strategy: str, **options) -> StepRows:
    rows = options.pop("rows", None) or token_rows(task)
    world_size, rank = options.pop("world_size", 1), options.pop("rank", 0)
    budget = options.pop("token_budget", 4096)
    collator = Collator(
        task=task,
        packed=strategy == "packed",
        pad_token_id=0,
        last_token_pools=family in DECODERS,
        pad_to_length=MAX_LENGTH if strategy == "fixed" else None,
        mask_token_id=4,
        special_token_ids=VOCABULARY.special_token_ids,
        vocab_size=100,
        max_length=MAX_LENGTH,
        **options,
    )
    planner = Planner(strategy, budget, MAX_LENGTH, world_size)
    batches = GlobalBatches(len(rows), 12, seed=3)
    return StepRows(rows, batches, planner, collator, rank)


def gradient(model: TaskModel, batches) -> tuple[float, torch.Tensor]:
    """Mean loss and the gradient (parameters,) of one step given as rank batches."""
    model.zero_grad()
    total = 0.0
    for batch in batches:
        for micro in batch.micro_batches:
            loss, _ = model(micro.tensors())
            (loss / batch.num_targets).backward()
            total += loss.item() / batch.num_targets
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return total, torch.cat(grads)
