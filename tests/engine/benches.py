"""Benchmarks for tests: tiny token rows on disk, and a machine simulated by
formulas."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flatout.engine.benchmark.runner import Bench
from flatout.engine.benchmark.trials.processes import Answer
from flatout.engine.benchmark.trials.trial_spec import TrialResult, TrialSpec
from flatout.engine.launch.job_files import JobFiles, token_key
from flatout.engine.parameters import Settings, parse_settings
from flatout.engine.train.setup.job import TrainJob
from tests.engine.families import (
    CONFIGS,
    LABEL_NAMES,
    MAX_LENGTH,
    VOCABULARY,
    token_rows,
)

QUICK = {"steps_per_trial": 3, "repeats": 2, "max_window_s": 1.0}
ONE_WINDOW = {
    "steps_per_trial": 2,
    "warmup_steps": 1,
    "repeats": 1,
    "min_window_s": 0.0,
    "trial_timeout_s": 200,
}
"""One window of two steps per trial."""


def settings(**benchmark: Any) -> Settings:
    """Return settings for a tiny BERT on rows of 3 to 24 tokens."""
    return parse_settings(
        {
            "runtime": {"precision": "fp32", "threads": 1},
            "model": {"config": {"model_type": "bert", **CONFIGS["bert"]}},
            "tokenize": {"max_length": MAX_LENGTH},
            "train": {"global_batch_size": 8, "epochs": 1},
            "benchmark": {**ONE_WINDOW, **benchmark},
        }
    )


def job_files(
    folder: Path, rows: int = 48, task: str = "sequence-classification"
) -> JobFiles:
    splits = {
        name: token_rows(task, count)
        for name, count in (("train", rows), ("validation", 12), ("test", 12))
    }
    job = TrainJob(
        settings(),
        **splits,
        vocabulary=VOCABULARY,
        label_names=tuple(LABEL_NAMES),
        work_folder=folder,
        metrics_file=folder / "metrics.jsonl",
    )
    return JobFiles.of(job, folder / "rows", token_key(job.train))


SPEC = ("kind", "mode", "label", "world_size")
OWN = ("status", "note", "elapsed_s", "log", "key")


def trial(number: str = "001", **given: Any) -> TrialResult:
    """Return a successful trial with these columns."""
    asked = replace(spec("end_to_end"), **{n: given.pop(n) for n in SPEC if n in given})
    own = {name: given.pop(name) for name in OWN if name in given}
    return TrialResult(number, asked, figures=given, **{"status": "ok", **own})


def spec(kind: str, **options: Any) -> TrialSpec:
    return TrialSpec(kind, "grid", settings(**QUICK), options=options)


TIME_SHARE = {"loader": 0.46, "again": 0.46}
"""Fractions of the duration of an end-to-end trial (7.0 s on two cores, 2026-11-25)."""


@dataclass
class FormulaBench(Bench):
    """A benchmark on a simulated machine, which tests the search rather than the clock.

    A step loads for `io_ms`, divided among the workers. The compute time depends on
    padding, on a minimum time per micro-batch, and on the size of the cache.
    """

    machine: dict[str, float] = field(default_factory=dict)
    memory_gib: float = 16.0
    seconds: float = 0.0
    """The time that real trials would have taken."""

    def _answer(self, spec: TrialSpec, key: str) -> Answer:
        figures = getattr(self, f"_{spec.kind}")(spec)
        taken = self.machine.get("trial_s", 10.0) * TIME_SHARE.get(spec.kind, 1.0)
        self.seconds += taken
        return Answer(figures.pop("status", "ok"), "", taken, figures)

    def _loader(self, spec: TrialSpec) -> dict[str, Any]:
        workers = int(spec.settings.train.loader.num_workers)
        ms = self.machine["io_ms"] / max(1, workers)
        return {"loader_samples_per_s": 1000 * self._batch(spec) / ms}

    def _compute(self, spec: TrialSpec) -> dict[str, Any]:
        return self._rated(spec, self._compute_ms(spec))

    def _end_to_end(self, spec: TrialSpec) -> dict[str, Any]:
        workers = spec.settings.train.loader.num_workers
        count = 0 if workers == "auto" else int(workers)
        compute_ms, io_ms = self._compute_ms(spec), self.machine["io_ms"]
        if count == 0:
            total_ms = compute_ms + io_ms
        else:  # a worker also uses the cores of the step
            slowed = compute_ms * (1 + self.machine.get("worker_cost", 0.0) * count)
            total_ms = max(slowed, io_ms / count)
        return self._rated(spec, total_ms) | {"num_workers": count} | self._times(spec)

    def _again(self, spec: TrialSpec) -> dict[str, Any]:
        return self._end_to_end(spec)

    def _times(self, spec: TrialSpec) -> dict[str, Any]:
        """Return the throughput relative to `below`, as both are measured at the same
        time."""
        if "below" not in spec.options:
            return {}
        asked = replace(spec, settings=parse_settings(spec.options["below"]))
        rates = [
            self._end_to_end(replace(one, options={})).get("samples_per_s")
            for one in (spec, asked)
        ]
        return {"times_below": rates[0] / rates[1]} if all(rates) else {}

    def _batch(self, spec: TrialSpec) -> int:
        return spec.settings.train.global_batch_size

    def _compute_ms(self, spec: TrialSpec) -> float:
        train = spec.settings.train
        strategy = "packed" if train.batching == "auto" else train.batching
        tokens = self._batch(spec) * self.rows.facts.mean_length
        padded = tokens * self.machine.get(strategy, 1.0)
        budget = self._budget(spec)
        parts = -(-int(padded) // budget)
        slow = self.machine.get("cache_slope", 0.0) * min(padded, budget)
        ms = padded * (1 + slow) * 0.01 + parts * self.machine["part_ms"]
        at_once = train.distributed.bucket_mib == "all"
        return ms * (self.machine.get("all_at_once", 1.0) if at_once else 1.0)

    def _budget(self, spec: TrialSpec) -> int:
        budget = spec.settings.train.token_budget
        return 8192 if budget == "auto" else int(budget)

    def _rated(self, spec: TrialSpec, total_ms: float) -> dict[str, Any]:
        train = spec.settings.train
        rate = 1000 * self._batch(spec) / total_ms
        if self._budget(spec) > self.machine.get("memory_tokens", 10**6):
            return {"status": "oom"}
        return {
            "samples_per_s": rate,
            "total_ms": total_ms,
            "strategy": "packed" if train.batching == "auto" else train.batching,
            "token_budget": self._budget(spec),
            "num_workers": 0,
            "reserved_memory_gib": 1.0,
        }
