"""Whether a GPU gives right results at the recorded rates: one table, one exit status.

    python -m tests.tools.gpu_check
    python -m tests.tools.gpu_check --only rates --against ../another/checkout

On one or two GPUs, at most 8 minutes. `--against` trains the same configurations in
another checkout too, the two alternating (A B B A). `--rehearse` runs every part in
small where no GPU is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from queue import Queue
from statistics import median

PROJECT = Path(__file__).parents[2]
RECORDED = Path(__file__).with_name("gpu_rates.json")
TOLERATED = 0.85
"""Of the recorded rate: hosts of one GPU type differ by about a tenth."""
TAIL = 1_500
"""Characters of a failed command's output that are shown."""


@dataclass(frozen=True)
class Configuration:
    """A training whose rate is recorded; about ten seconds of steps on an H200."""

    env: str
    global_batch_size: int
    steps: int
    log_every: int

    @property
    def name(self) -> str:
        return f"{self.env} {self.global_batch_size}"


CONFIGURATIONS = (
    Configuration("bert_base", 16, 2_400, 200),
    Configuration("bert_base", 256, 400, 40),
    Configuration("bert_base", 704, 160, 16),
    Configuration("qwen3", 256, 70, 7),
)
IN_SMALL = (Configuration("test", 16, 8, 2), Configuration("base", 16, 160, 20))


@dataclass
class Check:
    """A line of the table."""

    name: str
    status: str
    seconds: float
    detail: str = ""
    figures: dict[str, object] = field(default_factory=dict)

    def line(self) -> str:
        return f"{self.name:<32} {self.status:<6} {self.seconds:6.0f} s  {self.detail}"


class FailedError(RuntimeError):
    """A command that did not end well; its text is the end of the output."""


def run(
    command: Sequence[str], checkout: Path, gpu: int | None = None, timeout_s: int = 400
) -> str:
    """Output of `command` with the sources of `checkout`, on all GPUs or on one. Raises
    FailedError."""
    path = os.pathsep.join([f"{checkout / 'src'}", os.environ.get("PYTHONPATH", "")])
    one = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": path, **one},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise FailedError(f"not done in {timeout_s:g} s") from None
    if done.returncode:
        raise FailedError(f"status {done.returncode}\n{done.stdout[-TAIL:]}")
    return done.stdout


def undisturbed() -> dict[str, object]:
    """Parameters of a training on one device whose rate alone is wanted. So few steps
    would not be compiled by themselves."""
    import torch

    return {
        "train.epochs": 1000,
        "train.compile": torch.cuda.is_available(),
        "train.evaluate_every": "null",
        "train.resume": "never",
        "train.distributed.num_processes": 1,
        "guard.enabled": False,
        "tracking.log_model": False,
    }


def kedro(
    checkout: Path,
    env: str,
    pipelines: str,
    parameters: dict[str, object],
    gpu: int | None = None,
) -> None:
    given = ",".join(f"{name}={value}" for name, value in parameters.items())
    command = ["-m", "kedro", "run", f"--env={env}", f"--pipelines={pipelines}"]
    run([*command, f"--params={given}"], checkout, gpu)


def rate(checkout: Path, data: Path, wanted: Configuration, gpu: int | None) -> float:
    """Samples/s that one training reports."""
    parameters = {
        "data_dir": data,
        "train.global_batch_size": wanted.global_batch_size,
        "train.max_steps": wanted.steps,
        "train.log_every": wanted.log_every,
        **undisturbed(),
    }
    kedro(checkout, wanted.env, "train", parameters, gpu)
    report = data / "08_reporting" / "train_report.json"
    return json.loads(report.read_text(encoding="utf-8"))["samples_per_s"]


@dataclass
class Rates:
    """Trainings of one checkout, or of two that alternate."""

    folder: Path
    checkouts: list[Path]
    configurations: Sequence[Configuration]
    rounds: int = 1
    """Of A B B A, where there are two checkouts."""

    def __post_init__(self) -> None:
        import torch

        self.gpus: Queue[int | None] = Queue()
        for gpu in range(torch.cuda.device_count()) or [None]:
            self.gpus.put(gpu)

    def data(self, checkout: Path, wanted: Configuration) -> Path:
        name = wanted.name.replace(" ", "-")
        return self.folder / f"{self.checkouts.index(checkout)}-{name}"

    def prepare(self) -> None:
        """Tokens of every checkout and configuration. Raises FailedError."""
        asked = product(self.checkouts, self.configurations)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda pair: self._tokens(*pair), asked))

    def _tokens(self, checkout: Path, wanted: Configuration) -> None:
        place = {"data_dir": self.data(checkout, wanted)}
        kedro(checkout, wanted.env, "split,tokenize", place)

    def measure(self, wanted: Configuration) -> Check:
        """On a GPU that nothing else here uses."""
        begin, gpu = time.monotonic(), self.gpus.get()
        try:
            return self._measure(wanted, begin, gpu)
        finally:
            self.gpus.put(gpu)

    def _measure(self, wanted: Configuration, begin: float, gpu: int | None) -> Check:
        turns = [*self.checkouts, *reversed(self.checkouts)]
        turns = self.rounds * turns if len(self.checkouts) > 1 else self.checkouts
        found: dict[Path, list[float]] = {checkout: [] for checkout in self.checkouts}
        try:
            for checkout in turns:
                data = self.data(checkout, wanted)
                found[checkout].append(rate(checkout, data, wanted, gpu))
        except FailedError as error:
            return Check(wanted.name, "FAILED", time.monotonic() - begin, str(error))
        return _judged(wanted, list(found.values()), time.monotonic() - begin)


def _judged(wanted: Configuration, found: list[list[float]], seconds: float) -> Check:
    mine, figures = median(found[0]), {"samples_per_s": found[0]}
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    share, detail = None, f"{mine:,.0f} samples/s"
    if recorded["device"] == device_name() and wanted.name in recorded["samples_per_s"]:
        share = mine / recorded["samples_per_s"][wanted.name]
        detail += f", {share:.3f} of the recorded rate"
    if len(found) > 1:
        ratio = mine / median(found[1])
        figures |= {"against_samples_per_s": found[1], "ratio": ratio}
        turns = "  ".join(f"{a:,.0f}/{b:,.0f}" for a, b in zip(*found, strict=True))
        detail += f", {ratio:.3f} of the other checkout ({turns})"
    status = "SLOW" if share is not None and share < TOLERATED else "ok"
    return Check(wanted.name, status, seconds, detail, figures)


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def timed(name: str, command: Sequence[str]) -> Check:
    """A command whose last line of output says what it found."""
    begin, output = time.monotonic(), ""
    try:
        output = run(command, PROJECT).strip()
        status, detail = "ok", output.split("\n")[-1]
    except FailedError as error:
        status, detail = "FAILED", str(error)
    seconds = time.monotonic() - begin
    return Check(name, status, seconds, detail, {"output": output})


def commands() -> dict[str, list[str]]:
    """What is checked beside rates. Without a GPU Triton interprets, for minutes."""
    import torch

    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/engine/test_gpu.py"]
    if torch.cuda.is_available():
        tests += ["-n", "4"]
    found = {"tests": tests}
    if torch.cuda.is_available():
        found["kernels"] = ["-m", "tests.engine.kernel_checks"]
    return found


def checks(options: argparse.Namespace, folder: Path) -> Iterator[Check]:
    """Commands and the making of tokens at the same time, rates alone behind them."""
    known = IN_SMALL if options.rehearse else CONFIGURATIONS
    named = options.configurations
    configurations = [one for one in known if not named or one.name in named]
    checkouts = [PROJECT, *([options.against.resolve()] if options.against else [])]
    rates = Rates(folder, checkouts, configurations, options.rounds)
    wanted = {n: c for n, c in commands().items() if n in options.only}
    begin = time.monotonic()
    with ThreadPoolExecutor() as pool:
        tokens = pool.submit(rates.prepare) if "rates" in options.only else None
        yield from _as_they_end([pool.submit(timed, *one) for one in wanted.items()])
    if tokens is None:
        return
    if fault := tokens.exception():
        yield Check("tokens", "FAILED", time.monotonic() - begin, str(fault))
        return
    with ThreadPoolExecutor(rates.gpus.qsize()) as pool:
        yield from _as_they_end([pool.submit(rates.measure, c) for c in configurations])


def _as_they_end(running: list[Future[Check]]) -> Iterator[Check]:
    return (one.result() for one in as_completed(running))


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where all is well, 1 where a check failed or a rate is low."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parts = ["tests", "kernels", "rates"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    names = [one.name for one in (*CONFIGURATIONS, *IN_SMALL)]
    parser.add_argument("--configurations", nargs="+", choices=names, help="rates of")
    parser.add_argument("--against", type=Path, help="another checkout, for its rates")
    parser.add_argument("--rounds", type=int, default=1, help="of A B B A")
    parser.add_argument("--rehearse", action="store_true", help="in small, on a CPU")
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    options = parser.parse_args(arguments)
    begin, found = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="flatout-gpu-check-") as folder:
        for check in checks(options, Path(folder)):
            found.append(check)
            print(check.line(), flush=True)  # noqa: T201
            if options.out:
                figures = json.dumps([asdict(one) for one in found], indent=1)
                options.out.write_text(figures, encoding="utf-8")
    bad = [check.name for check in found if check.status != "ok"]
    verdict = f"not ok: {', '.join(bad)}" if bad else "all ok"
    minutes, seconds = divmod(int(time.monotonic() - begin), 60)
    print(f"{verdict}; {minutes} min {seconds} s on {device_name()}")  # noqa: T201
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
