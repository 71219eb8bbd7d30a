"""Fast inference with a saved model on all devices: compute the logits of rows.

Rows are sorted by length, then either concatenated (`packed`), or batched with rows of
similar length to minimise padding (`grouped`). The forward pass is the same as in
training, but without dropout and gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from itertools import cycle
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flatout.engine.batches.collation import Collator
from flatout.engine.batches.global_batches import Planner
from flatout.engine.families import family_of
from flatout.engine.machine.environment import Ranks
from flatout.engine.machine.runtime import set_up
from flatout.engine.models.model import TaskModel
from flatout.engine.models.row_faults import check_padding
from flatout.engine.ops import attention
from flatout.engine.parameters import Settings, SettingsError
from flatout.engine.predict.checks import (
    answering_task,
    check_vocabulary,
    label_names_of,
    longest_row,
    shape_of,
    vocabulary_of,
)
from flatout.engine.rows.layout import Ints, Layout
from flatout.engine.rows.rows import SplitRows
from flatout.engine.tasks import Calibrated, Task
from flatout.engine.tokenizing.tokenizer import TokenizerFile
from flatout.engine.train.evaluate import evaluate
from flatout.engine.train.own_figures import OwnMetrics
from flatout.engine.train.recording.report import Evaluation
from flatout.engine.train.setup.budgets import (
    default_token_budget,
    overhead_tokens,
    samples_at_once,
)
from flatout.engine.train.setup.resolved_config import choose_attention, choose_strategy

logger = logging.getLogger(__name__)

ROWS_AT_ONCE = 1024
"""Number of rows of similar length that are divided into micro-batches together."""
GPU_MULTIPLE = 64

Item = TypeVar("Item")


class Predictor:
    """Runs `model` (from `from_pretrained`) on the devices of this machine.

    The model is modified in place: its attention implementation is replaced and it is
    moved to the first device. Other devices get copies. Raises ModelError if the model
    makes no predictions for whole rows, or SettingsError if the parameters do not fit
    the model.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: TokenizerFile | None,
        settings: Settings,
        task: Task | None = None,
    ) -> None:
        """`tokenizer` is None if all samples have the same shape. `task` defaults to
        the model's own task."""
        vocabulary = vocabulary_of(tokenizer)
        self.task = task or answering_task(model, settings.model, vocabulary)
        self.label_names = label_names_of(model.config)
        self.shape = shape_of(model.config) if tokenizer is None else None
        if tokenizer is not None:
            check_vocabulary(model.config, tokenizer)
            check_padding(model, self.task)
        self.settings = settings.predict
        self.own_metrics = OwnMetrics.of(settings.train, self.task)
        self.max_length = longest_row(model.config, tokenizer, settings)
        self.runtime = set_up(settings.runtime)
        self.strategy, self.attention = self._choose(model.config, settings)
        self._collator = self._make_collator(model.config, tokenizer)
        self._planner = self._make_planner(model.config)
        attention.register()
        if family_of(model.config).attends:
            model.set_attn_implementation(self.attention)
        whole = TaskModel(model, self.task, self.max_length)
        self._model = whole.to(self.runtime.device).eval()
        self.devices = self._all_devices()
        self._models = {self.devices[0]: self._model}

    def logits(self, tokens: SplitRows) -> npt.NDArray[np.float32]:
        """Return the task's `target_outputs` (K, classes) for the K targets of all
        rows, in row order. Most tasks have one target per row. Micro-batches are
        assigned to the devices in turn, and each device is synchronised only once."""
        found: list[list[tuple[Ints, Tensor]]] = [[] for _ in self.devices]
        with torch.inference_mode():
            batches = self.prefetch(self.micro_batches(tokens))
            for (own, inputs), at in zip(batches, cycle(range(len(found)))):
                outputs = self._outputs(inputs, self.devices[at])
                found[at].append((own, outputs[: len(own)].float()))
        used = [part for part in found if part]
        parts = [torch.cat([t for _, t in part]).cpu().numpy() for part in used]
        rows = np.concatenate([own for part in used for own, _ in part])
        order = np.argsort(rows, kind="stable")
        return np.concatenate(parts)[order]

    def calibrated_logits(self, tokens: SplitRows) -> npt.NDArray[np.float32]:
        """Return the result of `logits`, divided by the temperature, if any."""
        found, task = self.logits(tokens), self.task
        if isinstance(task, Calibrated):
            found /= np.float32(task.calibration.temperature)
        return found

    def _outputs(self, tensors: dict[str, Tensor], device: torch.device) -> Tensor:
        if device not in self._models:
            self._models[device] = deepcopy(self._model).to(device)
        found: list[Tensor] = []

        def take(logits: Tensor, labels: Tensor) -> None:
            found.append(self.task.target_outputs(logits, labels))

        current = torch.cuda.device(device) if self.runtime.is_cuda else nullcontext()
        with current, self.runtime.autocast():
            batch = {n: t.to(device, non_blocking=True) for n, t in tensors.items()}
            self._models[device].logits_in_parts(batch, take)
            return torch.cat(found)

    def evaluate(self, rows: SplitRows) -> Evaluation:
        """Return the loss and metrics over all rows, computed by this process alone."""
        alone, planner = replace(self.runtime, ranks=Ranks()), self._planner
        return evaluate(
            self._model, rows, planner, self._collator, alone, self.own_metrics
        )

    def prefetch(self, items: Iterator[Item]) -> Iterator[Item]:
        """Yield `items` unchanged. On a GPU, the next item is prepared in a background
        thread. On a CPU, there is no such thread, because no core is idle."""
        return prefetched(items) if self.runtime.is_cuda else items

    def micro_batches(
        self, tokens: SplitRows, size: int | None = None
    ) -> Iterator[tuple[Ints, dict[str, Tensor]]]:
        """Yield the row numbers (K,) of the targets and the input tensors of each
        forward pass, starting with the longest rows. `size` is the number of rows per
        pass. If `size` is None, the token budget determines it."""
        lengths = tokens.lengths(np.arange(len(tokens)))
        order = np.argsort(-lengths, kind="stable")
        for start in range(0, len(order), size or ROWS_AT_ONCE):
            rows = order[start : start + (size or ROWS_AT_ONCE)]
            every = [np.arange(len(rows))]
            for own in every if size else self._planner.plan(lengths[rows])[0]:
                tensors = self._collator.collate(tokens, rows[own], epoch=0)
                if self.runtime.is_cuda:
                    tensors = {name: t.pin_memory() for name, t in tensors.items()}
                yield self._rows_of_targets(tokens, rows[own]), tensors

    def _rows_of_targets(self, tokens: SplitRows, rows: Ints) -> Ints:
        """Return `rows` (B,) as an array (K,) that repeats each row once per target."""
        if self.task.head_kind.one_a_row:
            return rows
        found = self.task.targets(tokens, rows, 0, pools_last=self._collator.pools_last)
        return np.repeat(rows, [len(places) for places in found.places])

    def _all_devices(self) -> list[torch.device]:
        """Return all visible GPUs, starting with this process's own GPU. In a
        distributed run or on a CPU, return only the process's own device."""
        own = self.runtime.device
        if own.type != "cuda" or self.runtime.ranks.world_size > 1:
            return [own]
        every = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
        return [own, *(device for device in every if device != own)]

    def _choose(self, config: Any, settings: Settings) -> tuple[str, str]:
        """Return the batching strategy and the attention implementation."""
        kernel, wanted = settings.runtime.attention, str(settings.predict.strategy)
        if self.shape is not None:
            wanted = "fixed"
        elif wanted == "auto":
            # On a CPU, packed rows are processed one by one, which is slower for short
            # rows.
            wanted = "packed" if self.runtime.is_cuda else "grouped"
        strategy, fault = choose_strategy(wanted, kernel, self.runtime, config)
        if fault:
            logger.info(fault)
        return strategy, choose_attention(kernel, self.runtime, config, strategy)

    def _make_planner(self, config: Any) -> Planner:
        cuda, wanted = self.runtime.is_cuda, self.settings.token_budget
        default = default_token_budget(cuda)
        if self.shape is not None:
            default = samples_at_once(self.shape, cuda)
        budget = max(default, self.max_length) if wanted == "auto" else wanted
        if budget < self.max_length:
            raise SettingsError(
                f"predict.token_budget={budget} is smaller than the longest row "
                f"({self.max_length} tokens): set it to at least {self.max_length}, or "
                "lower predict.max_length"
            )
        return Planner(
            strategy=self.strategy,  # type: ignore[arg-type]
            token_budget=budget,
            max_length=self.max_length,
            overhead_tokens=overhead_tokens(config, cuda),
        )

    def _make_collator(self, config: Any, tokenizer: TokenizerFile | None) -> Collator:
        cuda, packed = self.runtime.is_cuda, self.strategy == "packed"
        padding = getattr(config, "pad_token_id", None)
        if padding is None and tokenizer is not None:
            padding = tokenizer.token_id("pad_token")
        layout = Layout(
            packed=packed,
            pad_token_id=padding or 0,
            pad_multiple=self.runtime.pad_multiple(packed, GPU_MULTIPLE),
            row_multiple=GPU_MULTIPLE if cuda else 1,
            max_length=self.max_length,
        )
        return Collator(self.task, layout, family_of(config).causal)


def prefetched(items: Iterator[Item]) -> Iterator[Item]:
    """Yield `items`. Each item is computed in a background thread while the caller uses
    the previous item."""
    end: Any = object()
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = pool.submit(next, items, end)
            yield item
