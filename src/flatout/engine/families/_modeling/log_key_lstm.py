"""An LSTM that predicts the next log key (DeepLog, Du et al. 2017), for transformers.

`save_pretrained` copies this file next to the weights, so that they can be loaded
without flatout (trust_remote_code). The file may import only torch and transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput


@strict
class LogKeyLstmConfig(PreTrainedConfig):  # type: ignore[misc]
    """The sizes of the model, with the values of the paper as defaults."""

    model_type = "log_key_lstm"

    vocab_size: int = 64
    hidden_size: int = 64
    num_hidden_layers: int = 2
    dropout: float = 0.0
    window_keys: int | None = None
    """The number of preceding keys that a prediction uses, or None for all of them."""
    pad_token_id: int | None = 0


class LogKeyLstmPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """Base class of the log-key LSTM models. It keeps PyTorch's default
    initialisation."""

    config: LogKeyLstmConfig
    config_class = LogKeyLstmConfig
    base_model_prefix = "model"
    _input_embed_layer = "embeddings"

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Embedding, nn.LSTM, nn.Linear)):
            module.reset_parameters()


class LogKeyLstmModel(LogKeyLstmPreTrainedModel):
    """An LSTM that maps log keys (B, T) to the state after each key (B, T, hidden)."""

    def __init__(self, config: LogKeyLstmConfig) -> None:
        super().__init__(config)
        width, layers = config.hidden_size, config.num_hidden_layers
        self.embeddings = nn.Embedding(config.vocab_size, width)
        between = config.dropout if layers > 1 else 0.0
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=between)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        places: Tensor | None = None,
        **_: Any,
    ) -> BaseModelOutput:
        """Return the states (B, T, hidden). `attention_mask` is ignored, because
        padding on the right does not affect earlier states. If windows are used on a
        CPU, only the states at `places` (K,) are returned, as (1, K, hidden). `places`
        contains positions in the flattened batch."""
        window = self.config.window_keys
        if window is None or window >= input_ids.shape[1]:
            states = self._read(self.embeddings(input_ids))
        elif input_ids.is_cuda or (self.training and self.lstm.dropout):
            states = self._states_of_windows(self.embeddings(input_ids), window)
        elif places is None:
            every = torch.arange(input_ids.numel()).view_as(input_ids)
            states = self._states_at(every, input_ids, window)
        else:
            states = self._states_at(places.unsqueeze(0), input_ids, window)
        return BaseModelOutput(last_hidden_state=states)

    def _read(self, keys: Tensor) -> Tensor:
        """Return the outputs (B, T, hidden), computed in the weights' dtype. Under bf16
        autocast, a GPU would run the LSTM in fp16, where gradients underflow."""
        dtype = next(self.lstm.parameters()).dtype
        with torch.autocast(keys.device.type, enabled=False):
            found: Tensor = self.lstm(keys.to(dtype))[0]
        return found

    def _states_of_windows(self, keys: Tensor, window: int) -> Tensor:
        """Return the states (B, T, hidden) for embedded keys (B, T, hidden). Each
        window of `window` keys is run as a separate row, whose last state is used. The
        first window also provides the states of the row's first keys."""
        batch, _, width = keys.shape
        windows = keys.unfold(1, window, 1).transpose(2, 3)  # (B, T - window + 1, ...)
        found = self._read(windows.reshape(-1, window, width))
        found = found.view(batch, -1, window, width)
        return torch.cat([found[:, 0, :-1], found[:, :, -1]], dim=1)

    def _states_at(self, places: Tensor, keys: Tensor, window: int) -> Tensor:
        """Return the states of `_states_of_windows` only at `places` (...), with shape
        (..., hidden). Each distinct window is computed only once, because many windows
        are equal. This is not done on a GPU, where finding equal windows would
        synchronise the device, or with dropout, which makes equal windows differ."""
        step = (places % keys.shape[1]).clamp(max=window - 1)
        begins = (places - step).flatten().unsqueeze(1)
        windows = keys.flatten().take(begins + torch.arange(window))
        distinct, of_each = _distinct(windows, self.config.vocab_size)
        # Embed the keys time step by time step, so that the LSTM needs no input copy.
        inputs = self.embeddings(distinct.t()).transpose(0, 1)
        found = self._read(inputs).transpose(0, 1).flatten(0, 1)
        at = step.flatten() * len(distinct) + of_each
        return found.index_select(0, at).view(*places.shape, found.shape[-1])


def _distinct(windows: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return the distinct rows (D, W) of `windows` (N, W) in ascending order, and the
    index (N,) of each window in them. If all keys are valid and a window fits an
    integer whose digits are its keys, integers are sorted, which is faster."""
    width = windows.shape[1]
    invalid = (windows < 0) | (windows >= vocabulary)
    if vocabulary**width >= 2**63 or invalid.any():
        return torch.unique(windows, dim=0, return_inverse=True)
    powers = vocabulary ** torch.arange(width - 1, -1, -1)
    codes, of_each = torch.unique((windows * powers).sum(1), return_inverse=True)
    return codes.unsqueeze(1) // powers % vocabulary, of_each


class LogKeyLstmForCausalLM(LogKeyLstmPreTrainedModel):
    """The LSTM with a head, which maps log keys (B, T) to the logits (B, T, vocabulary)
    of the next key at each position."""

    def __init__(self, config: LogKeyLstmConfig) -> None:
        super().__init__(config)
        self.model = LogKeyLstmModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **_: Any,
    ) -> CausalLMOutput:
        """Return the logits, and the loss if `labels` (B, T) are given. The labels are
        equal to the keys, with -100 for padding."""
        states = self.model(input_ids).last_hidden_state
        logits, loss = self.lm_head(states), None
        if labels is not None:
            found = logits[:, :-1].flatten(0, 1).float()
            loss = nn.functional.cross_entropy(found, labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


LogKeyLstmConfig.register_for_auto_class()
LogKeyLstmForCausalLM.register_for_auto_class("AutoModelForCausalLM")
