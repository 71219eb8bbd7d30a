"""A residual multilayer perceptron for numeric samples of a fixed shape.

A sample is flattened and standardised with the statistics of the train split, which are
stored in the model's config. It then passes through `num_hidden_layers` residual blocks
of width `hidden_size`, each with a LayerNorm, two linear layers and a GELU (the ResNet
for tabular data of Gorishniy et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from flatout.engine.families._family import Family, Samples, Schedule

MOST_DEVIATIONS = 1e15
"""Limit of standardised values. The squares of larger ones overflow in a LayerNorm."""


class ResidualMlpConfig(PretrainedConfig):  # type: ignore[misc]
    """The sizes of the model and the statistics of its inputs."""

    model_type = "residual_mlp"

    num_hidden_layers: int = 3
    hidden_size: int = 16
    dropout: float = 0.0
    input_shape: Any = (1,)
    """The shape of a sample."""
    input_names: Any = ()
    """The columns of the table that the model was trained on, in order."""
    input_mean: Any = None
    """The mean of each value of a flattened sample."""
    input_deviation: Any = None
    """The standard deviation of each value of a flattened sample."""


class ResidualBlock(nn.Module):
    """The block x + W2 gelu(W1 norm(x)), whose inner size is twice the width."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)
        self.act = nn.GELU()
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor) -> Tensor:
        """Return the new states (B, width) for `states` (B, width)."""
        inner: Tensor = self.act(self.wide(self.norm(states)))
        return states + self.dropout(self.narrow(inner))


class ResidualMlpForSequenceClassification(PreTrainedModel):  # type: ignore[misc]
    """A classifier that maps samples (B, ...) to logits (B, num_labels)."""

    config_class = ResidualMlpConfig
    base_model_prefix = "residual_mlp"
    _no_split_modules = ("ResidualBlock",)

    def __init__(self, config: ResidualMlpConfig) -> None:
        super().__init__(config)
        size, width = int(torch.Size(config.input_shape).numel()), config.hidden_size
        mean = config.input_mean or [0.0] * size
        deviation = config.input_deviation or [1.0] * size
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32))
        self.register_buffer("deviation", torch.tensor(deviation, dtype=torch.float32))
        self._exact_mean: Tensor | None = None
        self.embedding = nn.Linear(size, width)
        layers = (
            ResidualBlock(width, config.dropout)
            for _ in range(config.num_hidden_layers)
        )
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, config.num_labels)
        self.post_init()

    def forward(
        self, inputs: Tensor, labels: Tensor | None = None, **_: Any
    ) -> SequenceClassifierOutput:
        """Return the logits for `inputs` (B, ...). `labels` is ignored."""
        standardised = self._standardised(inputs.flatten(1))
        if not self.training:  # In training, NaN losses show that a row is unusable.
            standardised = standardised.clamp(-MOST_DEVIATIONS, MOST_DEVIATIONS)
        states = self.embedding(standardised)
        for layer in self.layers:
            states = layer(states)
        return SequenceClassifierOutput(logits=self.classifier(self.norm(states)))

    def _standardised(self, flat: Tensor) -> Tensor:
        """Standardise `flat` (B, size) and return it in fp32. The mean of fp64 inputs
        is subtracted in fp64, because rounding them first could remove differences."""
        if flat.dtype is not torch.float64:
            return (flat.float() - self.mean) / self.deviation
        if self._exact_mean is None or self._exact_mean.device != flat.device:
            mean = self.config.input_mean or [0.0]
            self._exact_mean = torch.tensor(
                mean, dtype=torch.float64, device=flat.device
            )
        exact: Tensor = (flat - self._exact_mean) / self.deviation
        return exact.float()


class Tables(Samples):
    """Numeric samples of any fixed shape."""

    one_shape = True

    def shape_keys(self, facts: Any) -> dict[str, Any]:
        return {"input_shape": facts.shape}

    def fault(self, config: Any) -> str | None:
        for key, least in (("num_hidden_layers", 0), ("hidden_size", 1)):
            if not isinstance(size := getattr(config, key), int) or size < least:
                return f"model.config.{key} is {size!r}: set at least {least}"
        return None

    def shape(self, config: Any) -> tuple[int, ...]:
        return tuple(config.input_shape)

    def statistics_keys(self, facts: Any) -> dict[str, Any]:
        """Return one mean and one standard deviation per value of a sample. The
        statistics of images are per channel, so they are repeated for every pixel."""
        size = math.prod(facts.shape)
        return {
            "input_mean": np.resize(facts.mean, size).tolist(),
            "input_names": facts.names,
            "input_deviation": np.resize(facts.deviation, size).tolist(),
        }


class ResidualMlp(Family):
    """The family of `residual_mlp` models."""

    model_types = frozenset({"residual_mlp"})
    model_classes = (ResidualMlpForSequenceClassification,)
    samples = Tables()
    # Steps are limited by kernel launches, and a CUDA graph needs only one launch.
    schedule = Schedule(compiles=False, records_padded=True)
    attends = False

    def inputs(
        self, config: Any, batch: Mapping[str, Tensor], max_length: int
    ) -> dict[str, Any]:
        """Return the inputs (B, ...) unchanged, because the model standardises them."""
        return {"inputs": batch["inputs"]}


AutoConfig.register("residual_mlp", ResidualMlpConfig, exist_ok=True)
AutoModelForSequenceClassification.register(
    ResidualMlpConfig, ResidualMlpForSequenceClassification, exist_ok=True
)
