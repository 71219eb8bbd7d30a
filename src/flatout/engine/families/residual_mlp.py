"""Residual multilayer perceptron for numbers of a fixed shape, of any depth and width.

A sample is flattened and standardised with the train split's statistics, which the
model's config stores; then `depth` blocks of LayerNorm, two products and GELU around a
residual stream of width `hidden_size` (Gorishniy et al. 2021, ResNet for tables).
"""

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


class ResidualMlpConfig(PretrainedConfig):  # type: ignore[misc]
    """Sizes, and the statistics of the inputs."""

    model_type = "residual_mlp"

    num_hidden_layers: int = 3
    hidden_size: int = 16
    dropout: float = 0.0
    input_shape: Any = (1,)
    """Shape of a sample."""
    input_mean: Any = None
    """One number per value of a sample, in both of these."""
    input_deviation: Any = None


class ResidualBlock(nn.Module):
    """x + W2 gelu(W1 norm(x)), with an inner size of twice the width."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)
        self.act = nn.GELU()
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor) -> Tensor:
        """(B, width) -> (B, width)."""
        inner: Tensor = self.act(self.wide(self.norm(states)))
        return states + self.dropout(self.narrow(inner))


class ResidualMlpForSequenceClassification(PreTrainedModel):  # type: ignore[misc]
    """Logits (B, num_labels) of inputs (B, ...)."""

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
        """Logits for `inputs`; `labels`, which transformers may pass, are ignored."""
        states = self.embedding(self._standardised(inputs.flatten(1)))
        for layer in self.layers:
            states = layer(states)
        return SequenceClassifierOutput(logits=self.classifier(self.norm(states)))

    def _standardised(self, flat: Tensor) -> Tensor:
        """(B, size) fp32. fp64 inputs have differences that fp32 cannot represent."""
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
    """Samples of numbers, of any fixed shape."""

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
        """One number per value of a sample; images repeat those of their channels."""
        size = math.prod(facts.shape)
        return {
            "input_mean": np.resize(facts.mean, size).tolist(),
            "input_deviation": np.resize(facts.deviation, size).tolist(),
        }


class ResidualMlp(Family):
    """Family of `residual_mlp`."""

    model_types = frozenset({"residual_mlp"})
    model_classes = (ResidualMlpForSequenceClassification,)
    samples = Tables()
    # Its steps are limited by launches; a recorded graph is one launch.
    schedule = Schedule(compiles=False, records_padded=True)
    attends = False

    def inputs(
        self, config: Any, batch: Mapping[str, Tensor], max_length: int
    ) -> dict[str, Any]:
        """Inputs (B, ...) unchanged: the model standardises them."""
        return {"inputs": batch["inputs"]}


AutoConfig.register("residual_mlp", ResidualMlpConfig, exist_ok=True)
AutoModelForSequenceClassification.register(
    ResidualMlpConfig, ResidualMlpForSequenceClassification, exist_ok=True
)
