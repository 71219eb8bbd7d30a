"""One trial of the benchmark: what is asked, what comes back, and its own process.

A trial runs in a process group of its own with a time limit, so that one that hangs,
dies or fills the memory costs itself alone. The parent never touches the device.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import xxhash

from flatout.engine.environment import child_environment, training_environment
from flatout.engine.settings import Settings, parse_settings

Kind = Literal["end_to_end", "compute", "loader", "memory", "device", "profile", "peer"]
"""What a trial measures: training whole; its steps on batches that lie on the device
already; the loader alone; the largest token budget; the device's peak; where the time
of a few steps goes, operator by operator; the peer."""

MODULES: dict[str, str] = {"peer": "flatout.benchmarks.peers"}
"""Modules that run a kind; the others are run by `flatout.engine.trial`."""

POLL_S = 0.1
MAX_NOTE = 300


@dataclass(frozen=True)
class Measure:
    """How long a trial measures."""

    steps: int
    """Optimizer steps of a block: the rows that every window goes over."""
    warmup_steps: int
    repeats: int
    """Windows; the median counts."""
    min_window_s: float
    """A block is repeated until a window is at least so long."""
    max_window_s: float
    """Where steps are slow, a block has fewer of them."""
    headroom: float = 0.1
    """Share of the device's memory that stays free."""
    slow_rows_ms: float = 20.0


@dataclass(frozen=True)
class TrialSpec:
    """A question to the machine. `settings` are whole, with the changes applied."""

    kind: Kind
    mode: str
    settings: Settings
    measure: Measure
    label: str = ""
    world_size: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    """What a kind needs beside the settings."""

    def as_json(self) -> dict[str, Any]:
        settings = self.settings.model_dump(mode="json", exclude={"benchmark"})
        return {**asdict(replace(self, settings=None)), "settings": settings}  # type: ignore[arg-type]

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> TrialSpec:
        settings = parse_settings(stored["settings"])
        measure = Measure(**stored["measure"])
        return cls(**{**stored, "settings": settings, "measure": measure})

    def key(self, context: Mapping[str, Any]) -> str:
        """Digest of all that decides the answer; `context` names data, versions and
        device."""
        dumped = self.settings.model_dump(
            mode="json", include={"runtime", "model", "tokenize", "train"}
        )
        asked = {**self.as_json(), "settings": dumped, **context}
        del asked["label"], asked["mode"]
        return xxhash.xxh3_64_hexdigest(json.dumps(asked, sort_keys=True).encode())


@dataclass(frozen=True)
class TrialResult:
    """A line of benchmark_trials.csv. None: not measured by this kind of trial."""

    trial_id: str
    mode: str
    strategy: str
    global_batch_size: int
    token_budget: int | str
    num_workers: int | str
    prefetch_factor: int
    pin_memory: bool
    precision: str
    attention: str
    compile: bool | str
    cuda_graphs: bool | str
    gradient_checkpointing: bool
    io_ms: float | None = None
    """Mean time a step lost waiting for its batch."""
    forward_ms: float | None = None
    backward_ms: float | None = None
    optimizer_ms: float | None = None
    total_ms: float | None = None
    """Wall time of a step, in windows without phase timing."""
    total_ms_p90: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    padding_pct: float | None = None
    mfu_pct: float | None = None
    gpu_util_pct: float | None = None
    peak_memory_gib: float | None = None
    reserved_memory_gib: float | None = None
    compile_s: float | None = None
    recompiles: int | None = None
    status: str = "error"
    """ok, oom, error or timeout."""
    note: str = ""
    kind: str = "end_to_end"
    label: str = ""
    world_size: int = 1
    samples_per_s_spread_pct: float | None = None
    """(highest - lowest) / median over the windows."""
    loader_samples_per_s: float | None = None
    """Rate of the loader alone."""
    host_ms: float | None = None
    """Time the host needs to launch a step (GPU)."""
    first_step_s: float | None = None
    """Cold: workers started, first batch, compilation, first step."""
    tflops_per_s: float | None = None
    elapsed_s: float = 0.0
    """Of the whole trial, its process's start included."""
    key: str = ""
    log: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @classmethod
    def asked(cls, spec: TrialSpec, trial_id: str, key: str) -> TrialResult:
        """The line before the trial has run: settings as they were asked for."""
        runtime, train = spec.settings.runtime, spec.settings.train
        return cls(
            trial_id=trial_id,
            mode=spec.mode,
            strategy=train.strategy,
            global_batch_size=train.global_batch_size,
            token_budget=train.token_budget,
            num_workers=train.loader.num_workers,
            prefetch_factor=train.loader.prefetch_factor,
            pin_memory=train.loader.pin_memory,
            precision=runtime.precision,
            attention=runtime.attention,
            compile=train.compile,
            cuda_graphs=train.cuda_graphs,
            gradient_checkpointing=train.gradient_checkpointing,
            kind=spec.kind,
            label=spec.label,
            world_size=spec.world_size,
            key=key,
        )

    def answered(self, answer: Mapping[str, Any]) -> TrialResult:
        """With the figures of `answer` that are columns."""
        names = {entry.name for entry in fields(self)}
        return replace(self, **{k: v for k, v in answer.items() if k in names})


@dataclass(frozen=True)
class Answer:
    """What a trial's process left: status, note, and figures by name."""

    status: str
    note: str
    elapsed_s: float
    figures: Mapping[str, Any]


def run_isolated(
    spec: TrialSpec, folder: Path, timeout_s: float, max_resident_bytes: int | None
) -> Answer:
    """Run the trial whose spec.json lies in `folder`; its log is kept there.

    `max_resident_bytes`: end it before the machine runs out (devices without memory
    of their own).
    """
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    begin = time.perf_counter()
    kills = _out_of_memory_kills()
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            _command(spec, folder),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=child_environment(
                training_environment(spec.settings.runtime, spec.world_size)
            ),
            start_new_session=True,
        )
        try:
            fault = _wait(process, timeout_s, max_resident_bytes)
        finally:
            _kill_group(process)
    elapsed_s = time.perf_counter() - begin
    if fault is None and not result.exists():
        fault = _death(process.returncode, _out_of_memory_kills() > kills)
    if fault is not None:
        return Answer(fault[0], fault[1], elapsed_s, {})
    stored = json.loads(result.read_text())
    note = stored["note"][:MAX_NOTE]
    return Answer(stored["status"], note, elapsed_s, stored["figures"])


def _command(spec: TrialSpec, folder: Path) -> list[str]:
    module = MODULES.get(spec.kind, "flatout.engine.trial")
    if spec.world_size == 1:
        return [sys.executable, "-m", module, str(folder)]
    launcher = ["torch.distributed.run", "--standalone"]
    ranks = ["--nproc-per-node", str(spec.world_size)]
    return [sys.executable, "-m", *launcher, *ranks, "-m", module, str(folder)]


def _wait(
    process: subprocess.Popen[bytes], timeout_s: float, max_resident_bytes: int | None
) -> tuple[str, str] | None:
    """Until the end; the status and note of a trial that had to be stopped."""
    deadline = time.perf_counter() + timeout_s
    while process.poll() is None:
        if time.perf_counter() > deadline:
            return "timeout", f"stopped after {timeout_s:g} s"
        if max_resident_bytes and _resident_bytes(process.pid) > max_resident_bytes:
            return "oom", f"stopped at {max_resident_bytes / 2**30:.1f} GiB resident"
        time.sleep(POLL_S)
    return None


def _resident_bytes(pid: int) -> int:
    """Resident size of a process and those it started."""
    total = 0
    try:
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            total += one.memory_info().rss
    except psutil.Error:  # it ended while it was asked
        pass
    return total


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End the trial's workers and ranks with it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _death(returncode: int, out_of_memory: bool) -> tuple[str, str]:
    if out_of_memory:
        return "oom", "killed by the kernel: the machine's memory was full"
    if returncode < 0:
        name = signal.Signals(-returncode).name
        return "error", f"died by {name}: see its log"
    return "error", f"ended with status {returncode} and no result: see its log"


def _out_of_memory_kills() -> int:
    """Processes of this control group that the kernel has killed for memory."""
    try:
        lines = Path("/sys/fs/cgroup/memory.events").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
