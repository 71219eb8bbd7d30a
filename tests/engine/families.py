"""Tiny models of every family with a packed path, and token rows for them."""

from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F

from flatout.engine.batches.collation import Collator, StepRows
from flatout.engine.batches.global_batches import GlobalBatches, Planner
from flatout.engine.families import families
from flatout.engine.models.building import build
from flatout.engine.models.model import TaskModel
from flatout.engine.parameters import ModelSettings
from flatout.engine.rows.layout import Layout
from flatout.engine.rows.tokens import TokenRows
from flatout.engine.rows.vocabulary import Vocabulary
from flatout.engine.tasks import Task, make_task
from flatout.engine.tokenizing.encoders.encoded import Encoded, join_blocks

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
RECURRENT = {"log_key_lstm": {"hidden_size": 16}}
"""Families without attention, only for language models. One has a window."""
RECURRENT["log_key_lstm-window"] = RECURRENT["log_key_lstm"] | {
    "model_type": "log_key_lstm",
    "window_keys": 5,
}
DIRECTIONS = {"embedding_size": 12, "hidden_size": 16, "dropout": 0.0}
BILM = {
    "bilm": DIRECTIONS,
    "bilm-projected": {**DIRECTIONS, "model_type": "bilm"}
    | {"projection_size": 12, "residual": True, "tie_word_embeddings": True},
}
"""Bidirectional language models, which have no packed path."""
CONFIGS["modernbert-mean"] = CONFIGS["modernbert"] | {
    "model_type": "modernbert",
    "classifier_pooling": "mean",
}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
BOTH_SIDES = {
    f"{name}-both": {"model_type": name, **CONFIGS[name], **more, "is_causal": False}
    for name, more in {
        "llama": {"sliding_window": 3},  # ignored by models of this type
        "mistral": {},
        "qwen2": QWEN_WINDOW,
        "qwen3": QWEN_WINDOW,
        "gpt2": {},
    }.items()
}
"""Decoders with bidirectional attention."""
LABEL_NAMES = ["a", "b", "c"]
NAMED = (
    "sequence-classification",
    "multi-label-classification",
    "token-classification",
)
"""Tasks with label names."""
DECODERS = frozenset(
    t for f in families() if f.causal and f.packs for t in f.model_types
)
POOL_LAST = DECODERS | BOTH_SIDES.keys()


def no_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def token_rows(task: str, count: int = 24) -> TokenRows:
    """Return rows of 3 to 24 tokens, with labels if the task has one label per row."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(3, MAX_LENGTH + 1, (count,), generator=generator).tolist()
    rows = [
        [1, *torch.randint(5, 100, (n - 2,), generator=generator).tolist(), 2]
        for n in lengths
    ]
    return rows_of(task, rows)


def short_rows(task: str) -> TokenRows:
    """Return rows of one and two tokens, special or not, among longer ones."""
    generator = torch.Generator().manual_seed(11)
    lengths = [1, 2, 24, 1, 3, 2, 9, 1, 2, 17]
    rows = [torch.randint(5, 100, (n,), generator=generator).tolist() for n in lengths]
    return rows_of(task, [*rows, [1], [1, 2]])


def rows_of(task: str, rows: list[list[int]], **columns) -> TokenRows:
    """Return rows with these ids, with labels if the task has one label per row."""
    count = len(rows)
    columns["input_ids"] = pa.array(rows, pa.list_(pa.int32()))
    if task == "sequence-classification":
        columns["labels"] = pa.array([n % 3 for n in range(count)], pa.int64())
    if task == "regression":
        columns["labels"] = pa.array([n / 7 for n in range(count)], pa.float64())
    if task == "reranking":  # score and query
        pairs = [[n % 2, n // 4] for n in range(count)]
        columns["labels"] = pa.array(pairs, pa.list_(pa.float32(), 2))
    if task == "multi-label-classification":  # none, one, two and three of three labels
        flags = [[n % 2, n // 2 % 2, n % 3 == 0] for n in range(count)]
        columns["labels"] = pa.array(flags, pa.list_(pa.float32(), 3))
    if task == "token-classification":  # for some tokens, and for none in some rows
        tags = [[i % 3 if i % 4 else -100 for i in ids] for ids in rows]
        columns["labels"] = pa.array(tags, pa.list_(pa.int32()))
    return TokenRows(pa.table(columns))


def joined_rows(rows: TokenRows, size: int) -> TokenRows:
    """Return the rows as documents concatenated into blocks of `size` tokens."""
    documents = rows.views(np.arange(len(rows)))
    ids = np.concatenate(documents).astype(np.int32)
    lengths = np.array([len(part) for part in documents], np.int32)
    encoded = Encoded(ids, lengths, np.zeros(len(lengths), bool))
    return TokenRows(pa.Table.from_batches(join_blocks([encoded], size)))


def built(family: str, task: str, implementation: str = "sdpa"):
    """Return a transformers model without dropout, which is the same at each call."""
    torch.manual_seed(0)
    implementation = "eager" if family in RECURRENT | BILM else implementation
    known = CONFIGS | RECURRENT | BILM | BOTH_SIDES
    settings = ModelSettings(task=task, config={"model_type": family, **known[family]})
    made = task_of(task)
    return no_dropout(build(settings, made, VOCABULARY, MAX_LENGTH, implementation))


def task_of(name: str, seed: int = 0, vocabulary=VOCABULARY, **settings) -> Task:
    """Return a task with three classes."""
    known = ModelSettings(task=name, config={"model_type": "bert"}, **settings)
    names = LABEL_NAMES if name in NAMED else []
    return make_task(known, names, vocabulary, seed)


def collator_of(
    task: str, *, packed=False, pools_last=False, mask_probability=0.15, **options
) -> Collator:
    """Return a collator. `options` are those of the layout, and the task's `vocabulary`
    and `seed`."""
    own = {
        name: options.pop(name) for name in ("vocabulary", "seed") if name in options
    }
    made = task_of(task, mask_probability=mask_probability, **own)
    return Collator(made, Layout(packed=packed, **options), pools_last)


def task_model(
    family: str, task: str, implementation: str, whole: bool = False
) -> TaskModel:
    model = built(family, task, implementation)
    return TaskModel(model, task_of(task), MAX_LENGTH, whole=whole)


def step_rows(family: str, task: str, strategy: str, **options) -> StepRows:
    rows = options.pop("rows", None) or token_rows(task)
    world_size, rank = options.pop("world_size", 1), options.pop("rank", 0)
    budget = options.pop("token_budget", 4096)
    collator = collator_of(
        task,
        packed=strategy == "packed",
        pools_last=family in POOL_LAST,
        pad_to_length=MAX_LENGTH if strategy == "fixed" else None,
        max_length=MAX_LENGTH,
        **options,
    )
    planner = Planner(strategy, budget, MAX_LENGTH, world_size)
    batches = GlobalBatches(len(rows), 12, seed=3)
    return StepRows(rows, batches, planner, collator, rank)


def gradient(model: TaskModel, batches) -> tuple[float, torch.Tensor]:
    """Return the mean loss and the gradient (parameters,) of a step, given as rank
    batches."""
    model.zero_grad()
    total = 0.0
    for batch in batches:
        for micro in batch.micro_batches:
            loss, _ = model(micro)
            (loss / batch.num_targets).backward()
            total += loss.item() / batch.num_targets
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return total, torch.cat(grads)


def plain_gradient(family: str, task: str, data: StepRows) -> tuple[float, Any]:
    """Return the mean loss and the gradient of epoch 0, computed by transformers row by
    row, without padding, attention masks or row bounds. Only the masked tokens of
    masked-lm come from flatout."""
    model, total, count = built(family, task), 0.0, 0
    for number in range(len(data.rows)):
        (ids,) = data.rows.views(np.array([number]))
        row = data.collator.collate(data.rows, np.array([number]), 0)
        inputs = (
            row["input_ids"] if task == "masked-lm" else torch.tensor([ids.tolist()])
        )
        logits, labels = model(input_ids=inputs).logits, row["labels"]
        if task == "bidirectional-lm":
            onward, back = logits[0, :-1, 0], logits[0, 1:, 1]
            logits = torch.cat([onward, back])
            labels = torch.cat([inputs[0, 1:], inputs[0, :-1]])
        if task == "causal-lm":
            name = "labels" if data.rows.has_token_labels else "input_ids"
            (learnt,) = data.rows.views(np.array([number]), name)
            logits, labels = logits[0, :-1], torch.tensor(learnt.tolist())[1:]
        if task == "masked-lm":
            logits = logits[0, row["target_index"]]
        if task == "token-classification":
            (tags,) = data.rows.views(np.array([number]), "labels")
            labels = torch.tensor(tags[tags >= 0].tolist(), dtype=torch.int64)
            logits = logits[0, torch.tensor((tags >= 0).tolist())]
        loss = _summed_loss(logits, labels, task)
        loss.backward()
        real = len(labels) if labels.dim() > 1 else int((labels != -100).sum())
        total, count = total + loss.item(), count + real
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return total / count, torch.cat(grads) / count


def _summed_loss(logits, labels, task: str):
    if task == "regression":
        return F.mse_loss(logits.squeeze(-1), labels, reduction="sum")
    if task == "multi-label-classification":
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    return F.cross_entropy(logits, labels, reduction="sum")
