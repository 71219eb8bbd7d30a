"""A saved model with its tokenizer: texts in, logits out, as fast as the device goes.

Nothing here is random and nothing is padded that need not be: rows are encoded
together, sorted by length, and laid end to end (packed) or cut where padding is
least (grouped). The forward pass is that of training, without dropout and gradient.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from flatout.engine import attention
from flatout.engine.batching import Ints, Planner
from flatout.engine.collation import Collator
from flatout.engine.environment import tokenizer_parallelism
from flatout.engine.heads import DECODERS
from flatout.engine.model import TaskModel
from flatout.engine.predict_checks import (
    check_vocabulary,
    label_names_of,
    longest_row,
    task_of,
)
from flatout.engine.runtime import set_up
from flatout.engine.settings import Settings, SettingsError
from flatout.engine.tokenizing.encoding import Encoder
from flatout.engine.tokenizing.plain_encoder import EncodeOptions
from flatout.engine.tokenizing.token_recipes import empty_text_id
from flatout.engine.tokenizing.tokenizer import TokenizerFile
from flatout.engine.tokens import TokenRows

logger = logging.getLogger(__name__)

ROWS_AT_ONCE = 1024
"""Rows, of nearly one length, that are planned together."""
CPU_TOKEN_BUDGET = 8_192
GPU_TOKEN_BUDGET = 65_536
CPU_OVERHEAD_TOKENS = 64
"""What one more forward pass costs, in tokens."""
GPU_OVERHEAD_TOKENS = 4_096
GPU_MULTIPLE = 64

Item = TypeVar("Item")


class Predictor:
    """`model` (of `from_pretrained`) and its tokenizer on this machine's device.

    The model is changed in place: its attention, its device. Raises ModelError where
    it answers no one question a row, SettingsError where parameters do not fit it.
    """

    def __init__(
        self, model: Any, tokenizer: TokenizerFile, settings: Settings
    ) -> None:
        self.task = task_of(model)
        self.label_names = label_names_of(model.config)
        check_vocabulary(model.config, tokenizer)
        self.settings = settings.predict
        self.max_length = longest_row(model.config, tokenizer, settings)
        self.runtime = set_up(settings.runtime)
        self.strategy, self.attention = self._choose(model.config, settings)
        self._collator = self._make_collator(model.config, tokenizer)
        self._planner = self._make_planner()
        self._encoder = self._make_encoder(tokenizer)
        parameters = inspect.signature(model.forward).parameters
        self._takes_type_ids = "token_type_ids" in parameters
        self._model = self._prepare(model)

    def logits(self, tokens: TokenRows) -> npt.NDArray[np.float32]:
        """(N, classes) for N rows, in their order; one wait for the device."""
        rows, parts = [], []
        with torch.inference_mode():
            for own, inputs in self.ahead(self._micro_batches(tokens)):
                with self.runtime.autocast():
                    logits = self._model.logits(self._on_device(inputs))
                rows.append(own)
                parts.append(logits[: len(own)].float())
            found = torch.cat(parts).cpu().numpy()
        result = np.empty_like(found)
        result[np.concatenate(rows)] = found
        return result

    def encode(self, texts: Any, pairs: Any | None = None) -> TokenRows:
        """Token rows of N texts (and as many second texts), Arrow columns, no nulls."""
        with tokenizer_parallelism(True):
            encoded = self._encoder.encode(texts, pairs)
        offsets = np.zeros(len(encoded.lengths) + 1, np.int32)
        np.cumsum(encoded.lengths, out=offsets[1:])
        columns: dict[str, npt.NDArray[Any]] = {"input_ids": encoded.ids}
        if self._takes_type_ids and encoded.type_ids is not None:
            columns["token_type_ids"] = encoded.type_ids
        lists = {
            name: pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
            for name, values in columns.items()
        }
        labels = np.zeros(len(encoded.lengths), np.int64)  # a target each, unread
        return TokenRows(pa.table({**lists, "labels": labels}))

    def ahead(self, items: Iterator[Item]) -> Iterator[Item]:
        """The same items; on a GPU the next is made while it works on one. A CPU has
        no core to spare for that."""
        return made_ahead(items) if self.runtime.is_cuda else items

    def _micro_batches(
        self, tokens: TokenRows
    ) -> Iterator[tuple[Ints, dict[str, Tensor]]]:
        """Row numbers (B,) and the tensors of a forward pass, long rows first."""
        order = np.argsort(-tokens.all_lengths, kind="stable")
        for start in range(0, len(order), ROWS_AT_ONCE):
            rows = order[start : start + ROWS_AT_ONCE]
            plan = self._planner.plan(tokens.all_lengths[rows])
            for own in plan.micro_batches[0]:
                micro = self._collator.collate(tokens, rows[own], epoch=0)
                tensors = micro.tensors()
                if self.runtime.is_cuda:
                    tensors = {name: t.pin_memory() for name, t in tensors.items()}
                yield rows[own], tensors

    def _on_device(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        device = self.runtime.device
        return {name: t.to(device, non_blocking=True) for name, t in tensors.items()}

    def _choose(self, config: Any, settings: Settings) -> tuple[str, str]:
        """Strategy and attention kernel; grouped where packing is not exact."""
        wanted, kernel = settings.predict.strategy, settings.runtime.attention
        fault = attention.packing_fault(
            config, self.runtime.device.type, self.runtime.compute_dtype
        )
        if kernel in ("eager", "sdpa"):
            fault = f"runtime.attention: {kernel} works on padded batches"
        if wanted == "auto":
            # A CPU packs row by row: as fast on long rows, slower on short ones.
            wanted = "packed" if self.runtime.is_cuda else "grouped"
        if wanted == "grouped" or fault:
            if wanted == "packed":
                logger.info("rows are grouped by length, not packed: %s", fault)
            return "grouped", kernel if kernel == "eager" else "sdpa"
        short = attention.short_rows_fit(config, self.max_length)
        use_rows = kernel == "auto" and short and self.runtime.is_cuda
        return "packed", attention.ROWS if use_rows else attention.PACKED

    def _make_encoder(self, tokenizer: TokenizerFile) -> Encoder:
        options = EncodeOptions(
            max_length=self.max_length,
            has_pair=self.settings.text_pair_column is not None,
            empty_id=empty_text_id(tokenizer),
        )
        # Beside a GPU Python is what is short: it lays out and launches.
        return Encoder(tokenizer.backend, options, by_words=not self.runtime.is_cuda)

    def _make_planner(self) -> Planner:
        cuda, wanted = self.runtime.is_cuda, self.settings.token_budget
        default = GPU_TOKEN_BUDGET if cuda else CPU_TOKEN_BUDGET
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
            overhead_tokens=GPU_OVERHEAD_TOKENS if cuda else CPU_OVERHEAD_TOKENS,
        )

    def _make_collator(self, config: Any, tokenizer: TokenizerFile) -> Collator:
        cuda, packed = self.runtime.is_cuda, self.strategy == "packed"
        padding = getattr(config, "pad_token_id", None)
        if padding is None:
            padding = tokenizer.token_id("pad_token")
        return Collator(
            task=self.task,
            packed=packed,
            pad_token_id=padding or 0,
            last_token_pools=config.model_type in DECODERS,
            pad_multiple=self.runtime.pad_multiple(packed, GPU_MULTIPLE),
            row_multiple=GPU_MULTIPLE if cuda else 1,
            max_length=self.max_length,
        )

    def _prepare(self, model: Any) -> TaskModel:
        attention.register()
        model.set_attn_implementation(self.attention)
        model.config.use_cache = False
        return (
            TaskModel(model, self.task, self.max_length).to(self.runtime.device).eval()
        )


def made_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The same items; the next is made in a thread while one is used."""
    end: Any = object()
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = pool.submit(next, items, end)
            yield item
