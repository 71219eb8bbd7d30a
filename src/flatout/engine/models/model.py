"""Wrap a transformers model so that the head and the loss run only at the targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatout.engine.families import family_of
from flatout.engine.families._family import Head, row_means
from flatout.engine.models.adapters import has_adapter
from flatout.engine.models.model_files import save_sample_files
from flatout.engine.ops.precision import keep_output_precise
from flatout.engine.tasks import Task, has_custom_head

GRADIENT = "logits_gradient"
"""The batch field with the gradient (K, ...) of the loss with respect to the logits. If
present, it replaces the gradient of the task's loss."""
LOGITS_AT_ONCE = 2**27
"""The maximum number of logits in memory at a time (512 MiB in fp32). Those of 65,536
tokens over a vocabulary of 151,936 need 37 GiB, and the loss makes a copy."""


class TaskModel(nn.Module):
    """A model with its task's loss, for padded or packed micro-batches.

    The forward pass returns (loss, logits). The loss is an fp32 scalar, summed over the
    targets. The logits (K, classes) are detached, or None unless the task has one
    target per row.
    """

    def __init__(
        self, model: Any, task: Task, max_length: int, *, whole: bool = False
    ) -> None:
        """If `whole` is true, the model's own forward method computes the logits of all
        tokens, as in transformers."""
        super().__init__()
        self.model = model
        self.task = task
        self.family = family_of(model.config)
        self.max_length = max_length
        kind = getattr(model.config, "problem_type", None)
        if kind == "regression" or getattr(model.config, "num_labels", None) == 1:
            keep_output_precise(model)
        own = task.head if has_custom_head(task) else self.family.head(task.head_kind)
        self.head: Head | None = None if whole else own
        self._caches = bool(getattr(model.config, "use_cache", False))
        self._set_cache(False)
        self.fused_head = False
        """Whether the loss is computed without storing the logits (linear_loss.py)."""
        self.fused_layers: Mapping[str, int] = {}
        """The number of layers that use each fused part (see `Family.fuse`)."""
        usual = self.family.pools_mean(task.head_kind, model.config)
        self.pools_mean = task.pooling == "mean" if task.pooling else usual
        one_state = self.head is not None and not self.pools_mean
        self.narrow_points = self.family.narrow(model) if one_state else ()

    def _set_cache(self, enabled: bool) -> None:
        """Enable or disable the KV cache, which only generation uses."""
        if self._caches:
            self.model.config.use_cache = enabled

    def save_pretrained(self, folder: Path, weights: Any = None) -> None:
        """Save the model as transformers does, with its original cache setting.
        `weights` is the gathered state dict of a sharded model, or None."""
        self._set_cache(True)
        try:
            self.model.save_pretrained(folder, state_dict=weights)
            if has_adapter(self.model):  # peft does not save the label names
                self.model.config.save_pretrained(folder)
        finally:
            self._set_cache(False)
        save_sample_files(self.model.config, folder)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        if self.fused_head:
            return self._fused_loss(batch), None
        logits = self.logits(batch)
        if GRADIENT in batch:  # the loss spans several micro-batches
            return (logits.float() * batch[GRADIENT]).sum(), logits.detach()
        loss = self.task.loss(logits, batch["labels"])
        return loss, logits.detach() if self.task.head_kind.one_a_row else None

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the logits (K, classes or vocabulary) at the batch's targets."""
        if self.head is None:
            return self._whole_model_logits(batch)
        return self.head(self.model, self._target_states(batch))

    def logits_in_parts(
        self, batch: dict[str, Tensor], take: Callable[[Tensor, Tensor], None]
    ) -> None:
        """Call `take` repeatedly with the logits (k, classes or vocabulary) and labels
        (k,) of a few targets at a time, to reduce the memory that evaluation needs."""
        # Rows whose tags are evaluated together must stay in one part.
        pieces = getattr(self.model.config, "vocab_size", 1)
        several = pieces * math.prod(self.task.label_shape)
        size = max(1, LOGITS_AT_ONCE // (len(self.task.label_names) or several))
        size = len(batch["labels"]) if self.task.whole_batch else size
        whole = self.head is None
        states = self.logits(batch) if whole else self._target_states(batch)
        parts = zip(
            torch.split(states, size), torch.split(batch["labels"], size), strict=True
        )
        for part, labels in parts:
            take(part if self.head is None else self.head(self.model, part), labels)

    def _fused_loss(self, batch: dict[str, Tensor]) -> Tensor:
        from flatout.engine.ops.kernels.linear_loss import linear_cross_entropy

        hidden = self._target_states(batch)
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        weight = self.model.get_output_embeddings().weight
        hidden, labels = hidden.flatten(0, -2), batch["labels"].flatten()
        trained = weight.requires_grad
        return linear_cross_entropy(hidden, weight, labels, trained)[0]

    def _target_states(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the targets' last hidden states or row means, of shape (K, hidden)."""
        inputs = self._inputs(batch)
        for module in self.narrow_points:
            module.target_index = batch["target_index"]
        hidden: Tensor = self.model.base_model(**inputs).last_hidden_state
        if self.pools_mean:
            return row_means(hidden, batch)
        hidden = hidden.flatten(0, 1)
        padded = "cu_seqlens" not in batch and not self.task.head_kind.one_a_row
        # If all positions are targets, they are already in the collator's order.
        takes_all = padded and len(batch["target_index"]) == len(hidden)
        if self.narrow_points or takes_all:
            return hidden
        return hidden[batch["target_index"]]

    def _inputs(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        config, fields = self.model.config, batch
        if self.training:
            fields = dict(self.family.samples.augment(config, batch))
        return self.family.inputs(config, fields, self.max_length)

    def _whole_model_logits(self, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = self.model(**self._inputs(batch)).logits
        if self.task.head_kind.one_a_row:  # the model itself selects the tokens
            return logits
        # Perceiver returns logits for all its positions, even beyond the row length.
        logits = logits[:, : batch["input_ids"].shape[1]]
        return logits.flatten(0, 1)[batch["target_index"]]


def forget_failed_pass(model: nn.Module) -> None:
    """Drop the tensors that layers stored for other layers in a failed forward pass."""
    for module in model.modules():
        forget = getattr(module, "forget", None)
        if callable(forget):
            forget()


_TEXTS = ("out of memory", "can't allocate memory", "cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error`, or an error that caused it, is an out-of-memory error."""
    if error.__context__ is not None and is_out_of_memory(error.__context__):
        return True
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        text in str(error).lower() for text in _TEXTS
    )
