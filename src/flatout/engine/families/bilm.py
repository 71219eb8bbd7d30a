"""Bidirectional language models of LSTMs: two stacks, one embedding and one softmax."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import AutoConfig, AutoModel, AutoModelForPreTraining

from flatout.engine.families._family import lm_head
from flatout.engine.families._modeling.bilm import (
    BilmConfig,
    BilmForPreTraining,
    BilmModel,
)
from flatout.engine.families._recurrent import Recurrent
from flatout.engine.tasks import HeadKind

AutoConfig.register("bilm", BilmConfig, exist_ok=True)
AutoModel.register(BilmConfig, BilmModel, exist_ok=True)
AutoModelForPreTraining.register(BilmConfig, BilmForPreTraining, exist_ok=True)


class Bilm(Recurrent):
    """bilm: states (K, 2, output_size), of which each direction is one."""

    model_types = frozenset({"bilm"})
    first_type = "bilm"
    model_classes = (BilmModel, BilmForPreTraining)
    heads: ClassVar = {HeadKind.DIRECTIONS: lm_head}
    matrix_heads = frozenset({HeadKind.DIRECTIONS})

    def count_weights(self, config: Any) -> int:
        """Embedding, softmax, and of each LSTM four gates and the projection."""
        cells, width = config.hidden_size, config.output_size
        projection = cells * width if config.projection_size else 0
        inputs = config.embedding_size + (config.num_hidden_layers - 1) * width
        gates = 4 * cells * (inputs + config.num_hidden_layers * width)
        layers = 2 * (gates + config.num_hidden_layers * projection)
        tables = config.embedding_size
        tables += 0 if config.tie_word_embeddings else width
        return int(layers + tables * config.vocab_size)
