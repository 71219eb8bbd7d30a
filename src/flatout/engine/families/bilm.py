"""Bidirectional language models of LSTMs: two stacks, one embedding and one softmax."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForPreTraining

from flatout.engine.families._family import FusePlan, lm_head
from flatout.engine.families._modeling.bilm import (
    BilmConfig,
    BilmForPreTraining,
    BilmModel,
)
from flatout.engine.families._recurrent import Recurrent
from flatout.engine.ops.lstm import MULTIPLE, lockstep_lstm, weights_of
from flatout.engine.tasks import HeadKind

AutoConfig.register("bilm", BilmConfig, exist_ok=True)
AutoModel.register(BilmConfig, BilmModel, exist_ok=True)
AutoModelForPreTraining.register(BilmConfig, BilmForPreTraining, exist_ok=True)


class _LockstepBilm(BilmModel):
    """Both stacks a step at a time, with the same weights; on a GPU in fp32 one behind
    the other."""

    def _layers(self, ids: Tensor, mirror: Tensor, wanted: slice) -> tuple[Tensor, ...]:
        dtype = _dtype_of_products(self.embeddings.weight)
        if ids.is_cuda and dtype.itemsize > 2:
            return super()._layers(ids, mirror, wanted)
        both = torch.stack([ids, ids.gather(1, mirror)])
        found = self._in_step(both.mT, dtype)[wanted]
        return tuple(_side_by_side(states, mirror) for states in found)

    def _in_step(self, ids: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """ids (2, T, B) -> each layer's (2, T, B, output_size)."""
        states: Tensor = self.embeddings(ids)
        found: list[Tensor] = []
        for pair in zip(self.forward_layers, self.backward_layers, strict=True):
            given = self.dropout(states).to(dtype)
            read = lockstep_lstm(given, weights_of(pair, dtype))
            states = read + states if self.config.residual and found else read
            found.append(states)
        return found


def _dtype_of_products(weight: Tensor) -> torch.dtype:
    device = weight.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return weight.dtype


def _side_by_side(states: Tensor, mirror: Tensor) -> Tensor:
    """(2, T, B, N), the second from each row's end -> (B, T, 2, N)."""
    onward, back = states.transpose(1, 2)
    back = back.gather(1, mirror.unsqueeze(-1).expand_as(back))
    return torch.stack([onward, back], 2)


class Bilm(Recurrent):
    """bilm: states (K, 2, output_size), of which each direction is one."""

    model_types = frozenset({"bilm"})
    first_type = "bilm"
    model_classes = (BilmModel, BilmForPreTraining)
    heads: ClassVar = {HeadKind.DIRECTIONS: lm_head}
    matrix_heads = frozenset({HeadKind.DIRECTIONS})

    def fuse(self, model: Any, plan: FusePlan) -> None:
        """Both directions in step, where the LSTMs are projected."""
        cells, width = model.config.hidden_size, model.config.projection_size
        fits = width and cells % MULTIPLE == width % MULTIPLE == 0
        if fits and plan.has_triton and not plan.compiled:
            model.base_model.__class__ = _LockstepBilm

    def lane_tokens(self, config: Any) -> int:
        """Both directions' LSTMs and softmax."""
        return 64

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
