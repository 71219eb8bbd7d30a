"""Memory that a training will take, from the model's config alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flatout.engine.parameters import Settings
from flatout.engine.tasks import HeadKind, make_task, task_class

ACTIVATION_BYTES = 125
"""A token, layer and hidden unit, where the feed-forward part is four times as wide:
what BERT-base reserved on an H200 (28.0 GiB at 24,600 tokens). What a backward pass
keeps is 90 bytes in fp32, and 79 under bf16 autocast."""
STATE_BYTES = 16
"""A weight: itself, its gradient and Adam's two moments, all fp32."""


@dataclass(frozen=True)
class Estimate:
    """Bytes on one device."""

    parameters: int
    states: int
    """Weights, gradients, Adam's moments."""
    activations: int
    """Of a micro-batch, and the logits of language models."""
    tokens: int
    """Of the micro-batch."""

    @property
    def total(self) -> int:
        return self.states + self.activations


def estimate(settings: Settings, config: Any, budget: int, shards: int = 1) -> Estimate:
    """`budget`: most tokens of a micro-batch; `shards`: ranks that share the states."""
    train = settings.train
    parameters = count_parameters(config, settings.model.task)
    tokens = min(budget, train.global_batch_size * settings.max_length)
    hidden, wide = config.hidden_size, feed_forward(config)
    unit = ACTIVATION_BYTES * tokens * (2 * hidden + wide) // 6
    layers = config.num_hidden_layers
    if train.gradient_checkpointing:  # the input of each layer, and one layer whole
        activations = unit + 4 * layers * tokens * hidden
    else:
        activations = layers * unit
    share = make_task(settings.model).targets_per_token
    logits = int(2 * 4 * share * tokens * config.vocab_size) if share else 0
    states = STATE_BYTES * parameters // shards
    return Estimate(parameters, states, activations + logits, tokens)


def count_parameters(config: Any, task: str) -> int:
    """Weights of a model; biases and norms, under 1 %, are left out."""
    from flatout.engine.families import family_of

    family = family_of(config)
    if (own := family.count_weights(config)) is not None:
        return own
    hidden, heads = config.hidden_size, config.num_attention_heads
    head = getattr(config, "head_dim", None) or hidden // heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    attention = 2 * hidden * heads * head + 2 * hidden * shared * head
    gated = family.gated
    layer = attention + (3 if gated else 2) * hidden * feed_forward(config)
    positions = 0 if gated else getattr(config, "max_position_embeddings", 0)
    rows = config.vocab_size + positions
    predicts_pieces = task_class(task).head is HeadKind.VOCABULARY
    if predicts_pieces and not getattr(config, "tie_word_embeddings", True):
        rows += config.vocab_size
    return int(rows * hidden + config.num_hidden_layers * layer)


def feed_forward(config: Any) -> int:
    """Width of the layers' feed-forward part."""
    names = ("intermediate_size", "n_inner", "hidden_dim")
    found = (getattr(config, name, None) for name in names)
    return int(next((size for size in found if size), 4 * config.hidden_size))
