"""Heads by model family: hidden states of the targets alone -> logits.

Usual models compute their head for every token, padding included, and throw most
of it away. Here a base model's hidden states are gathered at the targets first
((K, hidden)), for padded and packed batches alike, and the head sees only those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Head = Callable[[Any, Tensor], Tensor]

DECODERS = frozenset({"gpt2", "llama", "mistral", "qwen2", "qwen3"})
"""Families that look to the left only: they classify from a row's last token."""


def _bert_classifier(model: Any, hidden: Tensor) -> Tensor:
    # The pooler takes the first token of each row: give it rows of one token.
    pooled = model.base_model.pooler(hidden.unsqueeze(1))
    return _tensor(model.classifier(model.dropout(pooled)))


def _roberta_classifier(model: Any, hidden: Tensor) -> Tensor:
    return _tensor(model.classifier(hidden.unsqueeze(1)))


def _distilbert_classifier(model: Any, hidden: Tensor) -> Tensor:
    pooled = model.pre_classifier(hidden).relu()
    return _tensor(model.classifier(model.dropout(pooled)))


def _modernbert_classifier(model: Any, hidden: Tensor) -> Tensor:
    return _tensor(model.classifier(model.drop(model.head(hidden))))


def _score(model: Any, hidden: Tensor) -> Tensor:
    return _tensor(model.score(hidden))


def _bert_mlm(model: Any, hidden: Tensor) -> Tensor:
    return _tensor(model.cls(hidden))


def _roberta_mlm(model: Any, hidden: Tensor) -> Tensor:
    return _tensor(model.lm_head(hidden))


def _distilbert_mlm(model: Any, hidden: Tensor) -> Tensor:
    hidden = model.activation(model.vocab_transform(hidden))
    return _tensor(model.vocab_projector(model.vocab_layer_norm(hidden)))


def _modernbert_mlm(model: Any, hidden: Tensor) -> Tensor:
    return _tensor(model.decoder(model.head(hidden)))


def _lm_head(model: Any, hidden: Tensor) -> Tensor:
    return _tensor(model.lm_head(hidden))


def _tensor(value: Any) -> Tensor:
    result: Tensor = value
    return result


_CLASSIFIERS: dict[str, Head] = {
    "bert": _bert_classifier,
    "roberta": _roberta_classifier,
    "distilbert": _distilbert_classifier,
    "modernbert": _modernbert_classifier,
    **dict.fromkeys(DECODERS, _score),
}
_HEADS: dict[str, dict[str, Head]] = {
    "sequence-classification": _CLASSIFIERS,
    "regression": _CLASSIFIERS,
    "masked-lm": {
        "bert": _bert_mlm,
        "roberta": _roberta_mlm,
        "distilbert": _distilbert_mlm,
        "modernbert": _modernbert_mlm,
    },
    "causal-lm": dict.fromkeys(DECODERS, _lm_head),
}

PACKABLE = frozenset(_CLASSIFIERS)
"""Model types with a parity test of packed against padded."""


def head_for(task: str, model_type: str) -> Head | None:
    """The head of a family; None where only the whole model can be run."""
    return _HEADS[task].get(model_type)


def position_offset(config: Any) -> int:
    """RoBERTa numbers positions from padding_idx + 1, the others from 0."""
    return int(config.pad_token_id) + 1 if config.model_type == "roberta" else 0


class _FullPrecision(nn.Linear):
    """Its output is a quantity: bf16 would give 276 for 274.54, and steps of 8 from
    1,024 on."""

    def forward(self, input: Tensor) -> Tensor:
        """(K, hidden) of any type -> (K, 1) fp32."""
        bias = None if self.bias is None else self.bias.float()
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), self.weight.float(), bias)


def keep_output_precise(model: Any) -> None:
    """The last layer of a regression computes in fp32, whatever the model does."""
    outputs = [
        module
        for module in model.modules()
        if type(module) is nn.Linear and module.out_features == 1
    ]
    if outputs:
        outputs[-1].__class__ = _FullPrecision
