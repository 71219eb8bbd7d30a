"""A transformer with flatout's forward pass: states at the targets, their loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.engine.collation import IGNORED
from flatout.engine.heads import head_for, keep_output_precise, position_offset
from flatout.engine.narrowing import narrow_last_layer, set_targets
from flatout.engine.settings import CLASSIFIES, Task


class TaskModel(nn.Module):
    """A model and its loss over one micro-batch, padded or packed alike.

    forward -> (loss, logits): the summed loss over the targets, fp32 (), and for
    tasks with one target a row the logits (K, classes), detached.
    """

    def __init__(
        self, model: Any, task: Task, max_length: int, *, whole: bool = False
    ) -> None:
        """`whole`: run the model as transformers does, with its head on all tokens."""
        super().__init__()
        self.model = model
        self.task = task
        self.max_length = max_length
        if task == "regression":
            keep_output_precise(model)
        self.head = None if whole else head_for(task, model.config.model_type)
        self.offset = position_offset(model.config)
        self.fused_head = False
        """Loss of a language model's head without its logits (linear_loss.py)."""
        self.narrowed = self.head is not None and narrow_last_layer(model)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        if self.fused_head:
            return self._fused_loss(batch), None
        logits = self.logits(batch)
        loss = summed_loss(logits, batch["labels"], self.task)
        return loss, logits.detach() if self.task in CLASSIFIES else None

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        """(K, classes or vocabulary) at the batch's targets."""
        if self.head is None:
            inputs = self._inputs(batch)
            return self._whole_model_logits(inputs, batch["target_index"])
        result: Tensor = self.head(self.model, self._target_states(batch))
        return result

    def _fused_loss(self, batch: dict[str, Tensor]) -> Tensor:
        from flatout.engine.kernels.linear_loss import linear_cross_entropy

        hidden = self._target_states(batch)
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        weight = self.model.get_output_embeddings().weight
        loss: Tensor = linear_cross_entropy(hidden, weight, batch["labels"])[0]
        return loss

    def _target_states(self, batch: dict[str, Tensor]) -> Tensor:
        """Last hidden states (K, hidden) of the targets."""
        inputs = self._inputs(batch)
        if self.narrowed:
            set_targets(self.model, batch["target_index"])
        hidden = self.model.base_model(**inputs).last_hidden_state.flatten(0, 1)
        if not self.narrowed:
            hidden = hidden[batch["target_index"]]
        result: Tensor = hidden
        return result

    def _inputs(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        inputs: dict[str, Any] = {"input_ids": batch["input_ids"]}
        for name in ("attention_mask", "token_type_ids"):
            if name in batch:
                inputs[name] = batch[name]
        if "cu_seqlens" in batch:
            inputs["position_ids"] = batch["position_ids"] + self.offset
            inputs["cu_seqlens"] = batch["cu_seqlens"]
            inputs["max_seqlen"] = self.max_length
        return inputs

    def _whole_model_logits(
        self, inputs: dict[str, Any], target_index: Tensor
    ) -> Tensor:
        logits: Tensor = self.model(**inputs).logits
        if logits.dim() == 2:  # (B, classes): the model has chosen the tokens itself
            return logits
        return logits.flatten(0, 1)[target_index]


def forget_failed_pass(model: nn.Module) -> None:
    """Drop what layers of a pass that failed left for those behind them."""
    for module in model.modules():
        forget = getattr(module, "forget", None)
        if callable(forget):
            forget()


def summed_loss(logits: Tensor, labels: Tensor, task: Task) -> Tensor:
    """Cross entropy, or squared error for regression, summed over targets, fp32."""
    if task == "regression":
        error = logits.squeeze(-1).float() - labels
        return torch.where(labels.isnan(), 0.0, error).square().sum()
    return F.cross_entropy(
        logits.float(), labels, ignore_index=IGNORED, reduction="sum"
    )
