"""How busy the GPU is while steps are measured, as its driver sees it."""

from __future__ import annotations

import threading
from types import TracebackType

import torch

from flatout.engine.runtime import Runtime

EVERY_S = 0.1


class GpuSampler:
    """Samples the driver's utilisation from a thread while `counts`; `mean_pct` is None
    on a CPU or where the driver's library is not installed."""

    def __init__(self, runtime: Runtime, *, counts: bool = True) -> None:
        self._runtime = runtime
        self.counts = counts
        self._samples: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> GpuSampler:
        if self._runtime.is_cuda:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def mean_pct(self) -> float | None:
        return sum(self._samples) / len(self._samples) if self._samples else None

    def _sample(self) -> None:
        while not self._stop.wait(EVERY_S):
            if not self.counts:
                continue
            try:
                self._samples.append(torch.cuda.utilization(self._runtime.device))
            except Exception:  # no nvidia-ml-py, or a driver that does not say
                return
