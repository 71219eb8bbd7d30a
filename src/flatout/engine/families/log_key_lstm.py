"""The family of LSTMs over sessions of log keys. Importing this module registers the
model type with transformers' AutoConfig and AutoModelForCausalLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from flatout.engine.families._family import Recurrent, lm_head
from flatout.engine.families._modeling.log_key_lstm import (
    LogKeyLstmConfig,
    LogKeyLstmForCausalLM,
)
from flatout.engine.tasks import HeadKind


def _precise_head(model: Any, hidden: Tensor) -> Any:
    """Return the logits, computed in the dtype of the weights. For so small a matrix,
    bf16 is slower on a CPU: 28 instead of 22 ms per step of DeepLog (2 cores)."""
    with torch.autocast(hidden.device.type, enabled=False):
        return lm_head(model, hidden)


class LogKeyLstm(Recurrent):
    """The family of `log_key_lstm` models."""

    model_types = frozenset({LogKeyLstmConfig.model_type})
    model_classes = (LogKeyLstmForCausalLM,)
    heads: ClassVar = {HeadKind.VOCABULARY: _precise_head}
    matrix_heads = frozenset({HeadKind.VOCABULARY})
    causal = True

    def cpu_overhead_tokens(self, config: Any) -> int:
        """Return the cost in tokens. For whole sessions, 256 was the fastest of 16 to
        1,024. Equal windows are computed once, so one large batch is fastest."""
        share = config.window_keys and not config.dropout
        return 2**30 if share else 256

    def inputs(
        self, config: Any, batch: Mapping[str, Tensor], max_length: int
    ) -> dict[str, Any]:
        """Return the model's inputs with the positions of the targets as `places`. With
        windows, only the windows of these positions are computed."""
        inputs = super().inputs(config, batch, max_length)
        return {**inputs, "places": batch["target_index"]}


AutoConfig.register(LogKeyLstmConfig.model_type, LogKeyLstmConfig, exist_ok=True)
AutoModelForCausalLM.register(LogKeyLstmConfig, LogKeyLstmForCausalLM, exist_ok=True)
