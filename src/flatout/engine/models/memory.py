"""Memory that a training takes: guessed from the model's config alone, or counted from
what it holds and from passes whose memory was measured."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flatout.engine.families import families, import_own
from flatout.engine.models.frozen import freeze
from flatout.engine.parameters import ModelSettings, Settings, SettingsError
from flatout.engine.tasks import make_task, task_class

if TYPE_CHECKING:
    from torch import nn

ACTIVATION_BYTES = 125
"""A token, layer and hidden unit, where the feed-forward part is four times as wide:
what BERT-base reserved on an H200 (28.0 GiB at 24,600 tokens). What a backward pass
keeps is 90 bytes in fp32, and 79 under bf16 autocast."""
STATE_BYTES, WEIGHT_BYTES = 16, 4
"""A weight: itself, its gradient and Adam's two moments, all fp32; itself alone."""
GIB = 2**30
STEPS_AN_OCTAVE = 8
"""Budgets are rounded down to one of so many between a power of two and the next, so
that a little more or less free memory cuts the same micro-batches."""


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


@dataclass(frozen=True)
class Demand:
    """Bytes of a training on one device, by the tokens of its micro-batches."""

    held: int
    """Between two steps: weights, buffers, workspaces of the libraries."""
    gradients: int
    moments: int
    """Of the optimizer."""
    update: int
    """What the optimizer takes for a moment."""
    fixed: float
    """Of a pass, however few its tokens: weights in the compute type."""
    per_token: float
    """Of a pass: activations, and what its kernels take for a moment."""

    @property
    def states(self) -> int:
        """While the optimizer steps, whatever the rows are."""
        return self.held + self.gradients + self.moments + self.update

    def passes(self, tokens: int) -> float:
        """Forward and backward, beside what is held and gradients."""
        return max(0.0, self.fixed + self.per_token * tokens)

    def peak(self, tokens: int, *, several: bool, graphs: bool = False) -> float:
        """Of steps with micro-batches of at most `tokens`, `several` or one of them. A
        recorded step has memory of its own, beside that of those that were not."""
        kept = self.held + self.moments
        step = self.passes(tokens) + (self.gradients if several else 0)
        peak = max(kept + step, self.states)
        return peak + (self.gradients + self.passes(tokens) if graphs else 0)

    def most_tokens(self, room: float, *, graphs: bool = False) -> int:
        """Of one of several micro-batches, so that a step stays within `room`; 0 where
        nothing does."""
        own = room - self.held - self.moments - self.gradients
        if graphs:
            own = (own - self.gradients) / 2
        if own < self.update or own < self.fixed:
            return 0
        return int((own - self.fixed) / max(self.per_token, 1e-9))


def line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """(fixed, per token) through the last two measurements (tokens, bytes); through
    nothing and a single one."""
    high, high_bytes = points[-1]
    low, low_bytes = points[-2] if len(points) > 1 else (0, 0.0)
    slope = max(0.0, (high_bytes - low_bytes) / (high - low))
    return high_bytes - slope * high, slope


def rounded_down(tokens: int, least: int = 1) -> int:
    """To one of STEPS_AN_OCTAVE between powers of two, but not below `least`."""
    if tokens <= STEPS_AN_OCTAVE:
        return max(least, tokens)
    unit = 1 << (tokens.bit_length() - STEPS_AN_OCTAVE.bit_length())
    return max(least, tokens // unit * unit)


def moment_bytes(groups: list[dict[str, Any]]) -> int:
    """That an optimizer of torch.optim will keep for its parameter `groups`: two of
    each with Adam, one with momentum, hardly any with Adafactor."""
    kept = 0
    for group in groups:
        copies = 2 if "betas" in group else int(bool(group.get("momentum")))
        kept += copies * sum(int(p.nbytes) for p in group["params"])
    return kept


def estimate(settings: Settings, config: Any, budget: int, shards: int = 1) -> Estimate:
    """`budget`: most tokens of a micro-batch; `shards`: ranks that share the states."""
    train = settings.train
    model = _without_weights(config, settings.model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
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
    states = _state_bytes(settings, model) // shards
    return Estimate(parameters, states, activations + logits, tokens)


def guessed_tokens(
    settings: Settings, config: Any, room: float, shards: int = 1
) -> int | None:
    """Of a micro-batch that fits in `room` bytes by `estimate`; None where the config
    does not say the sizes that it asks for, or rows are no tokens."""
    if settings.train.rows != "tokens":
        return None
    try:
        found = estimate(settings, config, 1, shards)
    except (AttributeError, KeyError, ValueError):
        return None
    return max(0, int((room - found.states) / max(1, found.activations)))


def count_parameters(config: Any, settings: ModelSettings) -> int:
    """Weights of a model for its task."""
    model = _without_weights(config, settings)
    return sum(parameter.numel() for parameter in model.parameters())


def _state_bytes(settings: Settings, model: nn.Module) -> int:
    """Of weights, and of gradients and Adam's moments of those that are trained."""
    with suppress(SettingsError):  # a pattern that fits nothing is refused elsewhere
        freeze(model, settings.train.freeze)
    return sum(
        parameter.numel() * (STATE_BYTES if parameter.requires_grad else WEIGHT_BYTES)
        for parameter in model.parameters()
    )


def _without_weights(config: Any, settings: ModelSettings) -> Any:
    """The model that `config` describes, on the meta device."""
    import torch
    import transformers

    families()  # their types become transformers' own
    import_own(settings)
    auto = getattr(transformers, task_class(settings.task).auto_class)
    own = {"trust_remote_code": True} if settings.trust_remote_code else {}
    with torch.device("meta"):
        return auto.from_config(copy.deepcopy(config), **own)


def feed_forward(config: Any) -> int:
    """Width of the layers' feed-forward part."""
    names = ("intermediate_size", "n_inner", "hidden_dim")
    found = (getattr(config, name, None) for name in names)
    return int(next((size for size in found if size), 4 * config.hidden_size))
