"""Measure outputs, throughput and metrics of an exported model on labelled rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flatout.engine.export.formats import Forward, Run
from flatout.engine.families import family_of
from flatout.engine.predict.predictor import Predictor
from flatout.engine.rows.rows import SplitRows
from flatout.engine.tasks import Calibrated, RankedRows

LOSS, NAN, SECONDS, RESAMPLES = "loss", math.nan, 1.0, 500
BATCHES = (1, 32)
"""The batch sizes at which throughput is measured, for SECONDS each."""
Line = dict[str, Any]
Floats = npt.NDArray[np.float64]


class Measure:
    """Measures exported formats on padded batches of `rows`, and compares them with the
    original model `plain`. `predictor` must pad rows rather than pack them."""

    def __init__(self, predictor: Predictor, rows: SplitRows, plain: Forward) -> None:
        self._task, config = predictor.task, plain.model.config
        family, most = family_of(config), predictor.max_length
        parts: Any = rows.sequences(np.arange(len(rows)))[0]
        batches = list(predictor.micro_batches(parts, BATCHES[-1]))
        self._micro = [micro for _, micro in batches]
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
        units = np.concatenate([own for own, _ in batches])
        if isinstance(self._task, RankedRows):
            units = self._labels[:, 1].numpy()
        draws = [] if self._task.whole_batch else _draws(units)
        self._samples = [torch.arange(len(units)), *draws]
        self._plain = self._outputs(plain)
        found = self._all(self._plain, self._samples[0])
        higher = (name for name, is_so in self._task.figures.items() if is_so)
        self.name = next((n for n in higher if math.isfinite(found.get(n, NAN))), LOSS)
        """The first metric of the task for which higher is better, or else the loss."""
        self._before = self._figures(self._plain)

    def line(self, name: str, loading: Callable[[], Run], size: int) -> Line:
        """Return the measurements of the format `name` of `size` bytes: load time,
        throughput, largest difference from the original model's outputs, metric
        (`value`) and its difference from the original model's (`change`), both with 95
        % confidence intervals."""
        start, run = time.perf_counter(), loading()
        run(self.example)  # may compile
        loaded = {"size_mib": size / 2**20, "load_s": time.perf_counter() - start}
        outputs = self._outputs(run)
        figures = self._figures(outputs)
        return {
            **{"format": name, **loaded},
            **{f"rows_per_s_at_{n}": self._rate(run, n) for n in BATCHES},
            "largest_difference": float((outputs - self._plain).abs().max()),
            **_with_interval("value", figures),
            **_with_interval("change", figures - self._before),
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
        rows, passed, start, batches = 0, 0.0, time.perf_counter(), cycle(ready)
        while passed < SECONDS:
            inputs = next(batches)
            run(inputs)
            rows += len(next(iter(inputs.values())))
            passed = time.perf_counter() - start
        return rows / passed

    def _figures(self, outputs: Tensor) -> Floats:
        """Return the metric over all rows, and over each bootstrap sample of rows (or
        queries). The samples are the same in every call. If the loss compares rows with
        one another, there are no samples."""
        found = (self._all(outputs, at) for at in self._samples)
        return np.array([figures.get(self.name, NAN) for figures in found])

    def _all(self, outputs: Tensor, at: Tensor) -> dict[str, float]:
        task, labels, logits = self._task, self._labels[at], outputs[at]
        if isinstance(task, Calibrated):
            logits = logits / task.calibration.temperature
        found, metrics = {}, task.metrics(torch.device("cpu"))
        if not task.whole_batch:
            targets = max(1, int(task.real(labels).sum()))
            found[LOSS] = float(task.loss(logits, labels)) / targets
        if metrics is not None:
            metrics.update(logits, labels)
            found |= metrics.compute()
        return found


def _draws(units: npt.NDArray[Any]) -> list[Tensor]:
    """Return RESAMPLES bootstrap samples of units (rows or queries), as tensors of the
    indices of their targets. `units` (K,) is the unit of each target."""
    _, unit, counts = np.unique(units, return_inverse=True, return_counts=True)
    members = np.split(np.argsort(unit, kind="stable"), np.cumsum(counts)[:-1])
    random = np.random.default_rng(0)
    drawn = (random.integers(0, len(members), len(members)) for _ in range(RESAMPLES))
    return [torch.from_numpy(np.concatenate([members[n] for n in d])) for d in drawn]


def _with_interval(name: str, values: Floats) -> dict[str, float | None]:
    """Return the first of `values` under `name`, and the 95 % interval of the rest
    under `name`_low and `name`_high. The bounds are None if there are no further
    values."""
    known = values[1:][np.isfinite(values[1:])]
    ends = np.percentile(known, (2.5, 97.5)).tolist() if len(known) else (None, None)
    return {name: float(values[0]), f"{name}_low": ends[0], f"{name}_high": ends[1]}
