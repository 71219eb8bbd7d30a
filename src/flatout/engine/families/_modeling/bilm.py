"""A bidirectional LSTM language model (ELMo; Peters et al. 2018).

One stack of LSTMs reads a row from left to right, and another from right to left. Both
use the same embedding and softmax layer. transformers saves a copy of this file with
the weights, so the file may import only PyTorch and transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

FILE = __name__.rpartition(".")[2]


class BilmConfig(PreTrainedConfig):
    """The sizes of the model. Both stacks have the same sizes."""

    model_type = "bilm"

    vocab_size: int = 30_522
    pad_token_id: int | None = 0
    embedding_size: int = 128
    hidden_size: int = 256
    """The number of cells in an LSTM."""
    projection_size: int | None = None
    """The size of an LSTM's output and recurrent state, or None for `hidden_size`."""
    num_hidden_layers: int = 2
    """The number of LSTMs per stack."""
    residual: bool = False
    """Whether the input of each LSTM except the first is added to its output."""
    dropout: float = 0.1
    """The dropout rate for the inputs of each LSTM and of the softmax layer."""
    initializer_range: float = 0.1
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.auto_map = {
            "AutoConfig": f"{FILE}.BilmConfig",
            "AutoModel": f"{FILE}.BilmModel",
            "AutoModelForPreTraining": f"{FILE}.BilmForPreTraining",
        }

    @property
    def num_directions(self) -> int:
        """The number of states per token, one per direction."""
        return 2

    @property
    def output_size(self) -> int:
        """The size of a state in one direction."""
        return self.projection_size or self.hidden_size


@dataclass
class BilmStates(ModelOutput):
    """Hidden states, of shape (B, T, 2, output_size) per layer. Along the third axis,
    index 0 is the state of the left-to-right stack, and index 1 that of the
    right-to-left stack. Both stacks have read the token at the position itself."""

    last_hidden_state: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    """The states of each layer, starting with the first layer."""


@dataclass
class BilmOutput(ModelOutput):
    """The logits (B, T, 2, vocab_size). Direction 0 predicts the next token, and
    direction 1 the previous token."""

    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class BilmPreTrained(PreTrainedModel):
    """Base class of the bidirectional LSTM models. It keeps transformers' default
    weight initialisation, which is Xavier for LSTMs and zero for biases."""

    config_class = BilmConfig
    base_model_prefix = "bilm"
    _input_embed_layer = "embeddings"


class BilmModel(BilmPreTrained):
    """The two LSTM stacks without a head. The initial states of each row are zero."""

    def __init__(self, config: BilmConfig) -> None:
        super().__init__(config)
        if config.num_hidden_layers < 1:
            raise ValueError(f"num_hidden_layers is {config.num_hidden_layers}")
        self.embeddings = nn.Embedding(config.vocab_size, config.embedding_size)
        self.forward_layers = _stack(config)
        self.backward_layers = _stack(config)
        self.dropout = nn.Dropout(config.dropout)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> BilmStates:
        """Return the states for `input_ids` (B, T). `attention_mask` (B, T) is 0 for
        padding, which must be on the right."""
        mirror = mirrored_places(input_ids, attention_mask)
        wanted = slice(None) if output_hidden_states else slice(-1, None)
        layers = self._layers(input_ids, mirror, wanted)
        return BilmStates(
            self.dropout(layers[-1]), layers if output_hidden_states else None
        )

    def _layers(self, ids: Tensor, mirror: Tensor, wanted: slice) -> tuple[Tensor, ...]:
        """Return the states (B, T, 2, output_size) of the layers that `wanted` selects.
        `mirror` (B, T) contains the indices that reverse each row."""
        onward = self._run(self.forward_layers, ids)[wanted]
        back = self._run(self.backward_layers, ids.gather(1, mirror))[wanted]
        return tuple(
            torch.stack([one, _along(other, mirror)], 2)
            for one, other in zip(onward, back, strict=True)
        )

    def _run(self, stack: nn.ModuleList, ids: Tensor) -> list[Tensor]:
        states: Tensor = self.embeddings(ids)
        found: list[Tensor] = []
        for lstm in stack:
            read = _read(lstm, self.dropout(states))
            states = read + states if self.config.residual and found else read
            found.append(states)
        return found


class BilmForPreTraining(BilmPreTrained):
    """The language model. Both directions use the same output matrix."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "bilm.embeddings.weight"}

    def __init__(self, config: BilmConfig) -> None:
        super().__init__(config)
        if config.tie_word_embeddings and config.embedding_size != config.output_size:
            raise ValueError(
                f"tie_word_embeddings needs an embedding_size of {config.output_size}, "
                f"equal to the LSTMs' output, not {config.embedding_size}"
            )
        self.bilm = BilmModel(config)
        self.lm_head = nn.Linear(config.output_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> BilmOutput:
        """Return the logits. `BilmModel.forward` describes the arguments."""
        states = self.bilm(input_ids, attention_mask, output_hidden_states)
        logits = self.lm_head(states.last_hidden_state)
        return BilmOutput(logits, states.hidden_states)


def mirrored_places(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the indices (B, T) that reverse each row of `input_ids` (B, T). Padding
    keeps its index, so that it stays at the end of the row."""
    places = torch.arange(input_ids.shape[1], device=input_ids.device)
    if attention_mask is None:
        return places.flip(0).expand_as(input_ids)
    lengths = attention_mask.long().sum(1, keepdim=True)
    return torch.where(places < lengths, lengths - 1 - places, places)


def _along(states: Tensor, places: Tensor) -> Tensor:
    """Return `states` (B, T, H) with each row rearranged by the indices `places` (B,
    T)."""
    return states.gather(1, places.unsqueeze(-1).expand_as(states))


def _read(lstm: Any, states: Tensor) -> Tensor:
    """Return the LSTM's outputs (B, T, output_size) in fp32, or in bf16 under bf16
    autocast. On a GPU, PyTorch's autocast would use fp16, where gradients underflow."""
    kind = states.device.type
    is_bf16 = torch.is_autocast_enabled(kind) and kind == "cuda"
    if not (is_bf16 and torch.get_autocast_dtype(kind) == torch.bfloat16):
        with torch.autocast(kind, enabled=False):
            found: Tensor = lstm(states.to(next(lstm.parameters()).dtype))[0]
        return found
    weights = [weight.bfloat16() for weight in lstm.parameters()]
    zeros = [
        weights[0].new_zeros(1, len(states), size)
        for size in (lstm.proj_size or lstm.hidden_size, lstm.hidden_size)
    ]
    with torch.autocast(kind, enabled=False):
        # torch.func.functional_call would keep the bf16 weights, and with them the
        # autograd graph, in the LSTM, so that no CUDA graph could be captured.
        found = torch.lstm(
            *(states.bfloat16(), zeros, weights, True, 1, 0.0),
            *(lstm.training, False, True),
        )[0]
    return found


def _stack(config: BilmConfig) -> nn.ModuleList:
    sizes = [config.embedding_size]
    sizes += [config.output_size] * (config.num_hidden_layers - 1)
    return nn.ModuleList(
        nn.LSTM(
            size,
            config.hidden_size,
            batch_first=True,
            proj_size=config.projection_size or 0,
        )
        for size in sizes
    )


# Configs refer to this file, so transformers saves it with them.
BilmConfig.register_for_auto_class()
