"""Measure outputs, throughput and metrics of an exported model on labelled rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from flatout.engine.export.formats import Forward, Run
from flatout.engine.families import family_of
from flatout.engine.predict.predictor import Predictor
from flatout.engine.rows.rows import SplitRows
from flatout.engine.tasks import Calibrated, RankedRows

LOSS, SECONDS, RESAMPLES = "loss", 1.0, 500
BATCHES = (1, 32)
"""The batch sizes at which throughput is measured, for SECONDS each."""
Line = dict[str, Any]


class Measure:
    """Measures exported formats on padded batches of `rows`, and compares them with the
    original model `plain`. `predictor` must pad rows rather than pack them."""

    def __init__(self, predictor: Predictor, rows: SplitRows, plain: Forward) -> None:
        self._task, config = predictor.task, plain.model.config
        family, most = family_of(config), predictor.max_length
        parts: Any = rows.sequences(np.arange(len(rows)))[0]
        batches = predictor.micro_batches(parts, BATCHES[-1])
        owners, self._micro = zip(*batches, strict=True)
        # Tokenizers in transformers return integer masks.
        self.inputs = [
            {
                name: (t.long() if t.dtype == torch.bool else t).contiguous()
                for name, t in family.inputs(config, micro, most).items()
            }
            for micro in self._micro
        ]
        first = self.inputs[0]
        # Tracing cannot tell rows from tokens if there are as many rows as tokens.
        count = 3 - any(3 in t.shape[1:2] for t in first.values())
        self.example = {n: torch.cat([t] * 3)[:count] for n, t in first.items()}
        """Two or three rows with which the model is traced."""
        self._labels = torch.cat([micro["labels"] for micro in self._micro])
        has_queries = isinstance(self._task, RankedRows)
        units = self._labels[:, 1].numpy() if has_queries else np.concatenate(owners)
        draws = [] if self._task.whole_batch else _draws(units)
        self._samples = [torch.arange(len(units)), *draws]
        self._plain = self._outputs(plain)
        self._before = self._figures(self._plain)
        known = self._before.iloc[0].dropna()
        higher = (name for name, is_so in self._task.figures.items() if is_so)
        self.name = next((name for name in higher if name in known), LOSS)
        """The first metric of the task for which higher is better, or else the loss."""

    def line(self, name: str, loading: Callable[[], Run], size: int) -> Line:
        """Return the measurements of the format `name` of `size` bytes: load time,
        throughput, largest difference from the original model's outputs, metric
        (`value`) and its difference from the original model's (`change`), both with 95
        % confidence intervals."""
        start, run = time.perf_counter(), loading()
        run(self.example)  # may compile
        loaded = {"size_mib": size / 2**20, "load_s": time.perf_counter() - start}
        outputs = self._outputs(run)
        figures, before = self._figures(outputs)[self.name], self._before[self.name]
        return {
            **{"format": name, **loaded},
            **{f"rows_per_s_at_{n}": self._rate(run, n) for n in BATCHES},
            "largest_difference": float((outputs - self._plain).abs().max()),
            **_with_interval("value", figures),
            **_with_interval("change", figures - before),
            "fault": None,
        }

    def _outputs(self, run: Run) -> Tensor:
        """Return the model's outputs for all targets as a tensor of shape (K, ...)."""
        found = []
        for micro, inputs in zip(self._micro, self.inputs, strict=True):
            part = run(inputs)
            if not self._task.head_kind.one_a_row:
                part = part.flatten(0, 1)[micro["target_index"]]
            found.append(part.float())
        return torch.cat(found)

    def _rate(self, run: Run, size: int) -> float:
        """Return the throughput in rows/s with batches of up to `size` rows of similar
        length."""
        order = np.random.default_rng(0).permutation(len(self.inputs))
        ready = [{n: t[:size] for n, t in self.inputs[at].items()} for at in order]
        run(ready[0])
        rows, batches, start = 0, cycle(ready), time.perf_counter()
        while (passed := time.perf_counter() - start) < SECONDS:
            inputs = next(batches)
            run(inputs)
            rows += len(next(iter(inputs.values())))
        return rows / passed

    def _figures(self, outputs: Tensor) -> pd.DataFrame:
        """Return the loss and the metrics, one per column: first over all rows, then
        over each bootstrap sample of rows (or queries). The samples are the same in
        every call. If the loss compares rows with one another, it is NaN, and there are
        no samples."""
        task, found = self._task, list[dict[str, float]]()
        if isinstance(task, Calibrated):
            outputs = outputs / task.calibration.temperature
        for at in self._samples:
            labels, logits, loss = self._labels[at], outputs[at], math.nan
            if not task.whole_batch:
                targets = max(1, int(task.real(labels).sum()))
                loss = float(task.loss(logits, labels)) / targets
            found.append({LOSS: loss})
            if metrics := task.metrics(torch.device("cpu")):
                metrics.update(logits, labels)
                found[-1] |= metrics.compute()
        return pd.DataFrame(found)


def _draws(units: npt.NDArray[Any]) -> list[Tensor]:
    """Return RESAMPLES bootstrap samples of units (rows or queries), as tensors of the
    indices of their targets. `units` (K,) is the unit of each target."""
    members = [*pd.Series(units).groupby(units).indices.values()]
    random = np.random.default_rng(0)
    drawn = (random.integers(0, len(members), len(members)) for _ in range(RESAMPLES))
    return [torch.from_numpy(np.concatenate([members[n] for n in d])) for d in drawn]


def _with_interval(name: str, values: pd.Series[float]) -> dict[str, float | None]:
    """Return the first of `values` under `name`, and the 95 % interval of the rest
    under `name`_low and `name`_high. The bounds are None if no other value is known."""
    known = values[1:].dropna()
    low, high = known.quantile([0.025, 0.975]) if len(known) else (None, None)
    return {name: values[0], f"{name}_low": low, f"{name}_high": high}
