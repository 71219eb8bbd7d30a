"""The family of bidirectional LSTM language models."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import AutoConfig, AutoModel, AutoModelForPreTraining

from flatout.engine.families._family import Recurrent, lm_head
from flatout.engine.families._modeling.bilm import (
    BilmConfig,
    BilmForPreTraining,
    BilmModel,
)
from flatout.engine.tasks import HeadKind

AutoConfig.register("bilm", BilmConfig, exist_ok=True)
AutoModel.register(BilmConfig, BilmModel, exist_ok=True)
AutoModelForPreTraining.register(BilmConfig, BilmForPreTraining, exist_ok=True)


class Bilm(Recurrent):
    """The family of `bilm` models. Their hidden states have shape (K, 2, output_size),
    with one state for each direction."""

    model_types = frozenset({"bilm"})
    first_type = "bilm"
    model_classes = (BilmModel, BilmForPreTraining)
    heads: ClassVar = {HeadKind.DIRECTIONS: lm_head}
    matrix_heads = frozenset({HeadKind.DIRECTIONS})

    def cpu_overhead_tokens(self, config: Any) -> int:
        """Return the cost in tokens. Each time step of a micro-batch reads all weights,
        so few micro-batches are fastest. Of 16 to 2,048, 512 was the fastest."""
        return 512
