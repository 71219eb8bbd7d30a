"""Compute the memory that a training run needs, either from the model's config alone,
or from allocated tensors and measured forward and backward passes."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from flatout.engine.families import families, import_own
from flatout.engine.models.adapters import add_adapter, freeze
from flatout.engine.parameters import ModelSettings, Settings, SettingsError
from flatout.engine.rows import max_length, row_kind
from flatout.engine.tasks import make_task, task_class

ACTIVATION_BYTES = 125
"""Bytes of activations per token, layer and hidden unit if the feed-forward size is 4 x
hidden size, measured for BERT-base on an H200 (28.0 GiB for 24,600 tokens). The
backward pass needs 90 of them in fp32, or 79 with bf16 autocast."""
STATE_BYTES, WEIGHT_BYTES = 16, 4
"""Bytes per trained weight, including its gradient and Adam's two moments, and bytes
per frozen weight. All are in fp32."""
GIB = 2**30
STEPS_AN_OCTAVE = 8
"""The number of token budgets between two powers of two, to which budgets are rounded
so that a small change in free memory does not change the micro-batches."""


@dataclass(frozen=True)
class Estimate:
    """The estimated memory on one device, in bytes."""

    parameters: int
    states: int
    """The bytes of weights, gradients and Adam's moments."""
    activations: int
    """The bytes of a micro-batch's activations, including a language model's logits."""
    tokens: int
    """The number of tokens in the micro-batch."""

    @property
    def total(self) -> int:
        return self.states + self.activations


@dataclass(frozen=True)
class Demand:
    """The bytes that a run needs on one device, given the tokens per micro-batch."""

    held: int
    """Bytes in use between two steps, without moments: weights, buffers, workspaces."""
    gradients: int
    moments: int
    """Bytes of the optimizer's moments."""
    update: int
    """Temporary bytes during the optimizer's update."""
    fixed: float
    """The fixed bytes of a pass, e.g. for weights in the compute dtype."""
    per_token: float
    """Bytes of a pass per token: activations and temporary memory of kernels."""

    @property
    def states(self) -> int:
        """Bytes in use during an optimizer step, regardless of the number of tokens."""
        return self.held + self.gradients + self.moments + self.update

    def passes(self, tokens: int) -> float:
        """Return the bytes of a forward and backward pass over `tokens` tokens, in
        addition to the fp32 weights and gradients."""
        return max(0.0, self.fixed + self.per_token * tokens)

    def peak(self, tokens: int) -> float:
        """Return the peak bytes of steps with up to `tokens` tokens per micro-batch."""
        kept = self.held + self.moments + self.gradients
        return kept + max(self.passes(tokens), self.update)

    def most_tokens(self, room: float) -> int:
        """Return the most tokens per micro-batch that fit in `room` bytes, or 0."""
        own = room - self.held - self.moments - self.gradients
        if own < self.update or own < self.fixed:
            return 0
        return int((own - self.fixed) / max(self.per_token, 1e-9))


def line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Return the intercept and slope (fixed bytes and bytes per token) of the line
    through the last two `points` (tokens, bytes), or through one and the origin."""
    high, high_bytes = points[-1]
    low, low_bytes = points[-2] if len(points) > 1 else (0, 0.0)
    slope = max(0.0, (high_bytes - low_bytes) / (high - low))
    return high_bytes - slope * high, slope


def rounded_down(tokens: int, least: int = 1) -> int:
    """Round `tokens` down to one of STEPS_AN_OCTAVE values between two powers of two,
    but not below `least`."""
    if tokens <= STEPS_AN_OCTAVE:
        return max(least, tokens)
    unit = 1 << (tokens.bit_length() - STEPS_AN_OCTAVE.bit_length())
    return max(least, tokens // unit * unit)


def moment_bytes(groups: list[dict[str, Any]]) -> int:
    """Return the bytes of the moments that an optimizer will store for `groups`: two
    copies of the parameters with Adam, one with momentum, and none otherwise."""
    kept = 0
    for group in groups:
        copies = 2 if "betas" in group else int(bool(group.get("momentum")))
        kept += copies * sum(int(p.nbytes) for p in group["params"])
    return kept


def estimate(settings: Settings, config: Any, budget: int, shards: int = 1) -> Estimate:
    """Estimate a run's memory from its config, up to `budget` tokens per micro-batch,
    with weights and optimizer states divided among `shards` ranks."""
    train = settings.train
    model = without_weights(config, settings.model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tokens = min(budget, train.global_batch_size * max_length(settings))
    hidden = config.hidden_size
    names = ("intermediate_size", "n_inner", "hidden_dim")
    known = (getattr(config, name, None) for name in names)
    wide = next((size for size in known if size), 4 * hidden)
    unit = ACTIVATION_BYTES * tokens * (2 * hidden + wide) // 6
    layers = config.num_hidden_layers
    if train.gradient_checkpointing:  # inputs of all layers, activations of one layer
        activations = unit + 4 * layers * tokens * hidden
    else:
        activations = layers * unit
    share = make_task(settings.model).targets_per_token
    logits = int(2 * 4 * share * tokens * config.vocab_size) if share else 0
    with suppress(SettingsError):  # patterns without a match are rejected elsewhere
        freeze(model, train.freeze)
    states = sum(
        parameter.numel() * (STATE_BYTES if parameter.requires_grad else WEIGHT_BYTES)
        for parameter in model.parameters()
    )
    return Estimate(parameters, states // shards, activations + logits, tokens)


def guessed_tokens(
    settings: Settings, config: Any, room: float, shards: int = 1
) -> int | None:
    """Return how many tokens per micro-batch fit in `room` bytes according to
    `estimate`, or None if the config lacks a size or rows do not consist of tokens."""
    if row_kind(settings.train.rows).one_shape:
        return None
    try:
        found = estimate(settings, config, 1, shards)
    except (AttributeError, KeyError, ValueError):
        return None
    return max(0, int((room - found.states) / max(1, found.activations)))


def count_parameters(config: Any, settings: ModelSettings) -> int:
    """Return the number of weights of a model, including its task's head. If the model
    has an adapter, return only the number of trained weights."""
    model = without_weights(config, settings)
    every = not settings.lora.is_on
    return sum(p.numel() for p in model.parameters() if every or p.requires_grad)


def without_weights(config: Any, settings: ModelSettings) -> Any:
    """Return the model for `config`, with its adapter, on the meta device. Raises
    SettingsError if the model cannot have this adapter."""
    import torch
    import transformers

    families()  # registers their model types with transformers
    import_own(settings)
    auto = getattr(transformers, task_class(settings.task).auto_class)
    own = {"trust_remote_code": True} if settings.trust_remote_code else {}
    with torch.device("meta"):
        model = auto.from_config(copy.deepcopy(config), **own)
        add_adapter(model, settings, make_task(settings))
    return model
