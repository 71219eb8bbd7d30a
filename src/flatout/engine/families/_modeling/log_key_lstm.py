"""The next log key by an LSTM (DeepLog, Du et al. 2017), for transformers alone.

`save_pretrained` copies this file beside the weights, so that they load where flatout
is not installed, with trust_remote_code. It imports torch and transformers only.
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
    """Sizes; those of the paper by default."""

    model_type = "log_key_lstm"

    vocab_size: int = 64
    hidden_size: int = 64
    num_hidden_layers: int = 2
    dropout: float = 0.0
    window_keys: int | None = None
    """Keys that a prediction looks back on; None: all from the session's begin."""
    pad_token_id: int | None = 0


class LogKeyLstmPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """Weights begin as PyTorch draws them."""

    config: LogKeyLstmConfig
    config_class = LogKeyLstmConfig
    base_model_prefix = "model"
    _input_embed_layer = "embeddings"

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Embedding, nn.LSTM, nn.Linear)):
            module.reset_parameters()


class LogKeyLstmModel(LogKeyLstmPreTrainedModel):
    """Keys (B, T) -> states (B, T, hidden): at each key, of it and those before it."""

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
        """Padding stands on the right, where no earlier state sees it: the mask of it
        is not needed. Where states are wanted at `places` (K,) among the B T alone,
        windows on a CPU give no others: (1, K, hidden)."""
        window = self.config.window_keys
        if window is None or window >= input_ids.shape[1]:
            states = self.lstm(self.embeddings(input_ids))[0]
        elif input_ids.is_cuda or (self.training and self.lstm.dropout):
            states = self._states_of_windows(self.embeddings(input_ids), window)
        elif places is None:
            every = torch.arange(input_ids.numel()).view_as(input_ids)
            states = self._states_at(every, input_ids, window)
        else:
            states = self._states_at(places.unsqueeze(0), input_ids, window)
        return BaseModelOutput(last_hidden_state=states)

    def _states_of_windows(self, keys: Tensor, window: int) -> Tensor:
        """As if each window (of `window` keys) were a row of its own. The first keys
        have fewer before them: theirs are the states inside of the first window."""
        batch, _, width = keys.shape
        windows = keys.unfold(1, window, 1).transpose(2, 3)  # (B, T - window + 1, ...)
        found = self.lstm(windows.reshape(-1, window, width))[0]
        found = found.view(batch, -1, window, width)
        return torch.cat([found[:, 0, :-1], found[:, :, -1]], dim=1)

    def _states_at(self, places: Tensor, keys: Tensor, window: int) -> Tensor:
        """The same at `places` (...) alone -> (..., hidden), of `keys` (B, T). Equal
        windows are computed once: most occur several times. Finding them would keep a
        GPU waiting, and dropout tells them apart."""
        step = (places % keys.shape[1]).clamp(max=window - 1)
        begins = (places - step).flatten().unsqueeze(1)
        windows = keys.flatten().take(begins + torch.arange(window))
        distinct, of_each = torch.unique(windows, dim=0, return_inverse=True)
        # Key by key: so the LSTM takes its inputs without a copy.
        inputs = self.embeddings(distinct.t()).transpose(0, 1)
        found: Tensor = self.lstm(inputs)[0].transpose(0, 1).flatten(0, 1)
        at = step.flatten() * len(distinct) + of_each
        return found.index_select(0, at).view(*places.shape, found.shape[-1])


class LogKeyLstmForCausalLM(LogKeyLstmPreTrainedModel):
    """Keys (B, T) -> logits (B, T, vocabulary) of the key behind each."""

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
        """`labels` (B, T): the row itself, -100 where there is padding."""
        states = self.model(input_ids).last_hidden_state
        logits, loss = self.lm_head(states), None
        if labels is not None:
            found = logits[:, :-1].flatten(0, 1).float()
            loss = nn.functional.cross_entropy(found, labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


LogKeyLstmConfig.register_for_auto_class()
LogKeyLstmForCausalLM.register_for_auto_class("AutoModelForCausalLM")
