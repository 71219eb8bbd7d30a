"""A custom model family: an encoder that transformers does not have."""

from typing import ClassVar

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flatout.engine.families import Family
from flatout.engine.tasks import HeadKind


class ToyConfig(PretrainedConfig):
    """Sizes, with the names that conf/base uses."""

    model_type = "toy"

    def __init__(
        self,
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        **options,
    ):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**options)


class ToyLayer(torch.nn.Module):
    """Attention with the requested kernel, followed by a feed-forward layer."""

    is_causal = False

    def __init__(self, config):
        super().__init__()
        self.config, size = config, config.hidden_size
        self.joined = torch.nn.Linear(size, 3 * size)
        self.inner = torch.nn.Linear(size, config.intermediate_size)
        self.outer = torch.nn.Linear(config.intermediate_size, size)
        self.norm = torch.nn.LayerNorm(size)

    def forward(self, hidden, mask, **places):
        """Map states (B, T, N) to (B, T, N). `places` contains `cu_seqlens` of packed
        rows."""
        heads = self.config.num_attention_heads
        parts = self.joined(self.norm(hidden)).unflatten(-1, (3, heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each (B, heads, T, D)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        seen, _ = attend(self, query, key, value, mask, **places)
        hidden = hidden + seen.flatten(2)
        return hidden + self.outer(self.inner(hidden).tanh())


class ToyBase(PreTrainedModel):
    """The settings that all models of the family share."""

    config_class = ToyConfig
    base_model_prefix = "toy"
    _supports_sdpa = True
    _supports_attention_backend = True


class ToyModel(ToyBase):
    """Embeddings of tokens and positions, followed by layers."""

    def __init__(self, config):
        super().__init__(config)
        size = config.hidden_size
        self.tokens = torch.nn.Embedding(config.vocab_size, size)
        self.positions = torch.nn.Embedding(config.max_position_embeddings, size)
        layers = (ToyLayer(config) for _ in range(config.num_hidden_layers))
        self.layers = torch.nn.ModuleList(layers)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, position_ids=None, **places):
        """Map tokens (B, T) to states (B, T, N)."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.tokens(input_ids) + self.positions(position_ids)
        mask = None if attention_mask is None else attention_mask[:, None, None].bool()
        for layer in self.layers:
            hidden = layer(hidden, mask, **places)
        return BaseModelOutput(last_hidden_state=hidden)


class ToyForSequenceClassification(ToyBase):
    """A linear classifier of the first token's state."""

    def __init__(self, config):
        super().__init__(config)
        self.toy = ToyModel(config)
        self.classifier = torch.nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids, **inputs):
        """Map tokens (B, T) to logits (B, classes)."""
        states = self.toy(input_ids, **inputs).last_hidden_state
        return SequenceClassifierOutput(logits=self.classifier(states[:, 0]))


AutoConfig.register("toy", ToyConfig)
AutoModelForSequenceClassification.register(ToyConfig, ToyForSequenceClassification)


class Toy(Family):
    """A family that supports packed rows, because its layers use transformers'
    attention."""

    model_types = frozenset({"toy"})
    model_classes = (ToyForSequenceClassification,)
    heads: ClassVar = {HeadKind.ROW: lambda model, states: model.classifier(states)}
    packs = True
