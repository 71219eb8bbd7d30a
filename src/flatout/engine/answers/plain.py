"""Reference losses, computed with the transformers model and PyTorch's loss functions.

Rows of equal length share a forward pass, without padding or masks. If transformers
lacks the task or model, flatout's own model class and loss are used, without flatout's
optimisations. `Plain.described` describes the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatout.engine.batches.collation import Collator
from flatout.engine.families import family_of
from flatout.engine.machine.runtime import Runtime, exact_products
from flatout.engine.models.model import TaskModel
from flatout.engine.rows.layout import Ints, Layout
from flatout.engine.rows.rows import Rows, SplitRows
from flatout.engine.tasks import IGNORED, Task, has_custom_head

ROWS_AT_ONCE = 16
TYPES = "token_type_ids"
OF_ROWS = ("sequence-classification", "regression", "multi-label-classification")
OF_NEXT = ("causal-lm", "next-key")
OF_TOKENS = (*OF_NEXT, "token-classification", "masked-lm")
"""The token-level tasks that transformers also supports."""
FP32 = torch.finfo(torch.float32).eps / 2
"""The unit roundoff of fp32: half the distance from 1 to the next larger number."""

Result = TypeVar("Result")


@dataclass
class Part:
    """The summed loss and the logits of a group of rows in a step."""

    row_ids: Ints
    loss: Tensor
    """The loss summed over the targets, a scalar."""
    targets: int
    divisor: float
    """The divisor for the mean loss: the number of targets, or their total weight."""
    logits: Tensor
    """The logits (K, ...), one entry per target."""


@dataclass(frozen=True)
class Plain:
    """Computes reference losses of `model` for `task` on the rows of a split."""

    model: Any
    task: Task
    rows: SplitRows
    max_length: int

    @property
    def _has_counterpart(self) -> bool:
        """Whether transformers has the model class, and PyTorch the task's loss."""
        own = type(self.model).__module__.startswith("transformers.")
        return own and self.task.settings.task in {*OF_ROWS, *OF_TOKENS}

    @property
    def described(self) -> str:
        kind = type(self.model).__name__
        if self._has_counterpart:
            return f"plain transformers ({kind}), rows without padding, losses of torch"
        return (
            f"the module itself ({kind}) in fp32, with the task's own loss: "
            "transformers has no counterpart of this task and model"
        )

    def in_both_precisions(
        self, runtime: Runtime, compute: Callable[[], Result]
    ) -> tuple[Result, Result]:
        """Return the results of `compute` in fp32, and in the precision of the run. If
        that is fp32 too, the last bits of the weights are changed in between."""
        with exact_products():
            exact = compute()
        if roundoff_of(runtime) == FP32:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    signs = torch.randn_like(parameter).sign()
                    parameter.mul_(1 + 2 * FP32 * signs)
        with runtime.autocast():
            return exact, compute()

    def backward(self, row_ids: Ints) -> tuple[float, int, float]:
        """Compute the gradients of the loss summed over the rows `row_ids` (N,). Return
        the mean loss, the number of targets, and the divisor of the mean."""
        self.model.zero_grad(set_to_none=True)
        loss, targets, divisor = 0.0, 0, 0.0
        for part in self.parts(row_ids):
            with torch.autocast(self.model.device.type, enabled=False):
                part.loss.backward()  # type: ignore[no-untyped-call]
            loss, targets = loss + part.loss.item(), targets + part.targets
            divisor += part.divisor
        return loss / (divisor or 1.0), targets, divisor or 1.0

    def parts(self, row_ids: Ints) -> Iterator[Part]:
        """Yield the loss and logits of the rows `row_ids` (N,), in groups of a few
        rows. Random choices, such as masks, are those of the first epoch."""
        part = self._plain_part if self._has_counterpart else self._own_part
        rows, ids = self.rows.sequences(row_ids)
        samples = family_of(self.model.config).samples
        needs_all = self.task.whole_batch or samples.batch_statistics
        with sdpa_kernel(SDPBackend.MATH):
            for own in [ids] if needs_all else by_length(rows, ids):
                yield part(rows, own)

    def _plain_part(self, rows: Rows, ids: Ints) -> Part:
        logits, labels = self._outputs(rows, ids)
        logits, options = logits.float(), self.task.loss_options
        if labels.is_floating_point():
            is_number = self.task.settings.task == "regression"
            of = F.mse_loss if is_number else F.binary_cross_entropy_with_logits
            loss = of(logits.view_as(labels), labels, reduction="sum")
            return Part(ids, loss, len(labels), len(labels), logits)
        classes = options.class_weights or [1.0] * logits.shape[-1]
        weights = torch.tensor(classes, device=logits.device)
        smoothing = options.label_smoothing
        losses = F.cross_entropy(
            logits, labels, weights, label_smoothing=smoothing, reduction="none"
        )
        if options.focal_gamma:
            right = logits.softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
            losses = losses * (1 - right).clamp(min=1e-8) ** options.focal_gamma
        divisor = float(weights[labels].sum())
        return Part(ids, losses.sum(), len(labels), divisor, logits)

    def _outputs(self, rows: Rows, ids: Ints) -> tuple[Tensor, Tensor]:
        """Return the logits and labels (K, ...) of the equally long rows `ids` (B,)."""
        name, types = self.task.settings.task, {}
        inputs = labels = self._tensor(rows, ids)
        if name == "masked-lm":
            inputs, labels = self._masked(rows, ids, inputs)
        elif rows.has_token_labels:
            labels = self._tensor(rows, ids, "labels")
        if TYPES in self.rows.column_names:
            types = {TYPES: self._tensor(rows, ids, TYPES)}
        logits = self.model(input_ids=inputs, **types).logits
        if name in OF_ROWS:
            listed = self.rows.table.column("labels").take(ids.tolist()).to_pylist()
            return logits, torch.tensor(listed, device=logits.device)
        if name in OF_NEXT:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return logits[labels != IGNORED], labels[labels != IGNORED]

    def _tensor(self, rows: Rows, ids: Ints, column: str = "input_ids") -> Tensor:
        found = np.stack(rows.views(ids, column)).astype(np.int64)
        return torch.from_numpy(found).to(self.model.device)

    def _masked(self, rows: Rows, ids: Ints, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs (B, T) for masked-lm, i.e. `tokens` with masks, and the
        labels (B, T), which are ignored at unmasked positions."""
        drawn = self.task.targets(rows, ids, 0, pools_last=False)
        inputs = torch.from_numpy(np.stack(drawn.values or ()).astype(np.int64))
        labels = torch.full_like(tokens, IGNORED)
        for row, places in enumerate(drawn.places):
            labels[row, places] = tokens[row, places]
        return inputs.to(tokens.device), labels

    @cached_property
    def _module(self) -> TaskModel:
        """flatout's module without optimisations: the whole model computes its logits,
        or a custom head computes them from the last hidden states."""
        module = TaskModel(self.model, self.task, self.max_length, whole=True)
        if has_custom_head(self.task):
            module.head = self.task.head
        return module.train(self.model.training)

    def _own_part(self, rows: Rows, ids: Ints) -> Part:
        """Compute the loss of the rows `ids` (B,) with flatout's own model and loss."""
        task, vocabulary = self.task, self.task.vocabulary
        pad = vocabulary.pad_token_id if vocabulary else 0
        layout = Layout(pad_token_id=pad, max_length=self.max_length)
        collator = Collator(task, layout, self._module.family.causal)
        micro = collator.collate(rows, ids, 0)
        batch = {name: t.to(self.model.device) for name, t in micro.items()}
        logits, labels = self._module.logits(batch), batch["labels"]
        targets = int(task.real(labels).sum())
        divisor = task.divisor(rows, ids, 0) or targets
        return Part(ids, task.loss(logits, labels), targets, divisor, logits)


def by_length(rows: Rows, ids: Ints) -> Iterator[Ints]:
    """Group `ids` (N,) by row length. Yield arrays of at most ROWS_AT_ONCE ids."""
    lengths = rows.lengths(ids)
    for length in np.unique(lengths).tolist():
        own = ids[lengths == length]
        yield from np.split(own, range(ROWS_AT_ONCE, len(own), ROWS_AT_ONCE))


def roundoff_of(runtime: Runtime) -> float:
    """Return the unit roundoff of matmuls in the run's precision. That of TF32, if it
    is enabled, is the same as that of fp16."""
    tf32 = runtime.is_cuda and torch.get_float32_matmul_precision() != "highest"
    dtype = runtime.compute_dtype
    dtype = torch.float16 if tf32 and dtype == torch.float32 else dtype
    return torch.finfo(dtype).eps / 2
