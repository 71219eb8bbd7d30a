"""Mutation testing of the core, on CPU cores without a GPU.

    python -m tests.tools.mutants --count 300 --seed 20 --results mutants.jsonl

The seed decides which mutants are drawn from `MODULES`. Each is written into a copy of
the project. A fork of a process that has imported torch and pytest runs the tests that
reach its lines, fastest first, until one fails. A mutant that hangs is killed as well.
Mutants that are already in the file `--results` are skipped. The copies next to this
file (`.work`) are made at the first start, so delete them after changing the project.
`--only TEXT` selects mutants whose names contain the text.
"""

import argparse
import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.tools.mutant_tests import Ordered, Reached
from tests.tools.mutations import Mutant, mutants

PROJECT = Path(__file__).parents[2]
ENGINE = "src/flatout/engine"
PLAIN = ("test_step.py", "test_distributed.py::test_rows_and_gradients")
"""Tests that compare the core with plain PyTorch, on one rank and on two."""
SHAPES = ("test_bf16_on_cpus.py", "test_distributed.py::test_every_row")
RUNS = ("test_resume.py", "test_recorder.py", "test_faults.py::test_memory_that")
TOLD = ("test_recorder.py", "test_progress.py")
MODULES = {
    "train/step": (
        *(*PLAIN, "test_resume.py", "test_recorder.py", "test_audit.py"),
        "test_embedding.py",
    ),
    "train/optimizer": (
        *(*PLAIN, "test_resume.py", "test_optimizers.py"),
        *("test_own_parts.py", "test_schedule.py"),
    ),
    "train/flat_all_reduce": (*PLAIN, "test_distributed.py::test_gradients_in_one"),
    "train/loop": (
        *(*PLAIN, *RUNS, "test_early_stopping.py"),
        "test_distributed.py::test_ranks_with",
    ),
    "train/evaluate": (
        *(*PLAIN, "test_evaluate.py", "test_embedding.py", "test_metrics.py"),
        "test_own_parts.py",
    ),
    "batches/collation": (
        *(*PLAIN, *SHAPES, "test_collation.py", "test_model_parity.py"),
        "test_embedding.py",
    ),
    "batches/global_batches": (
        *(*PLAIN, *SHAPES),
        *("test_batching.py", "test_statistics.py", "test_row_steps.py"),
    ),
    "rows/layout": (*PLAIN, *SHAPES, "test_collation.py"),
    "tasks/_shared/cross_entropy": (
        *(*PLAIN, "test_evaluate.py", "test_loss_options.py"),
        *("test_metrics.py", "test_predict.py", "test_calibration.py"),
    ),
    "tasks/_shared/metrics": (
        *("test_evaluate.py", "test_metrics.py", "test_bidirectional.py"),
    ),
    "tasks/masked_lm": (
        *(*PLAIN, "test_collation.py", "test_model_parity.py", "test_tokenizer.py"),
    ),
    "train/recording/recorder": (
        *(*PLAIN, *TOLD, "test_resume.py", "test_health.py", "test_early_stopping.py"),
        *("test_own_parts.py", "test_measure.py::test_slow_habits"),
    ),
    "train/recording/metrics_file": (
        *("test_recorder.py", "test_resume.py", "test_row_steps.py"),
    ),
    "batches/loader": ("test_timing.py", *TOLD, "test_loader.py"),
    "train/recording/timing": (
        *("test_timing.py", "test_loader.py"),
        *TOLD,
        "test_resume.py",
        "test_step.py",
    ),
    "train/keeping/snapshots": (
        *("test_checkpoint.py", "test_resume.py", "test_distributed.py"),
        *("test_own_parts.py", "test_lora.py::test_a_killed_training"),
    ),
    "checkpoints/shards": ("test_checkpoint.py", "test_distributed.py"),
    "checkpoints/checkpoint_folder": (
        *("test_checkpoint.py", "test_resume.py"),
        "test_early_stopping.py",
    ),
    "checkpoints/checkpoint_writer": ("test_checkpoint.py", "test_resume.py"),
}
"""Modules from which mutants are drawn, with the tests that should notice them."""
PRELOADED = (
    *("accelerate", "hypothesis", "pandas", "scipy.stats", "torch._dynamo"),
    *("torch.distributed.fsdp", "transformers.models.bert.modeling_bert"),
    *("transformers.models.llama.modeling_llama", "transformers.trainer"),
    "torch.distributed.checkpoint",
)
COPIED = ("src", "tests", "conf", "docs", "pyproject.toml", "README.md", "Makefile")
LIMIT_S = 900


def path_of(module: str) -> str:
    return f"{ENGINE}/{module}.py"


def tests_of(modules: Collection[str]) -> tuple[str, ...]:
    names = {f"tests/engine/{name}" for m in modules for name in MODULES[m]}
    return tuple(sorted(names))


def enter(copy: Path) -> None:
    """Start a new session, in which `copy` is the project."""
    os.setsid()
    os.chdir(copy)
    with (copy / "output.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.path[:] = [str(copy), str(copy / "src"), *sys.path]
    os.environ["PYTHONPATH"] = f"{copy}/src"
    for name in [n for n in sys.modules if n.partition(".")[0] in ("tests", "flatout")]:
        del sys.modules[name]


def run_tests(copy: Path, files: list[str], plugin: Any, *options: str) -> int:
    return int(
        pytest.main(
            [
                *("-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"),
                *("--timeout=90", f"--basetemp={copy}/temporary", *options, *files),
            ],
            plugins=[plugin],
        )
    )


def reach(copy: Path, file: Path) -> None:
    """In a fork, run all tests on the original source, and record the lines reached."""
    enter(copy)
    names = tests_of(MODULES)
    paths = {str(copy / file): file for file in map(path_of, MODULES)}
    plugin = Reached(paths, names)
    files = sorted({name.partition("::")[0] for name in names})
    run_tests(copy, files, plugin)
    found = {"tests": plugin.tests, "at_import": sorted(plugin.at_import)}
    file.write_text(json.dumps(found))
    os._exit(0)


def order_for(mutant: Mutant, reached: dict[str, Any]) -> list[str]:
    """Return the tests that reach the mutant, fastest first, then tests that may reach
    it in other processes. For lines that run at import or only in a rank, return all
    tests of the module."""
    tests = reached["tests"]
    module = mutant.file.removeprefix(f"{ENGINE}/").removesuffix(".py")
    names, (first, last) = tests_of([module]), mutant.lines
    lines = {f"{mutant.file}:{line}" for line in range(first, last + 1)}
    everywhere = lines & set(reached["at_import"])
    own = {n: t for n, t in tests.items() if n.startswith(names)}
    reaching = {n for n, t in own.items() if everywhere or lines & {*t["lines"]}}
    starting = {n for n, t in own.items() if not reaching or t["process"]}

    def cost(name: str) -> tuple[bool, float]:
        return tests[name]["process"], tests[name]["seconds"]

    return sorted(reaching | starting, key=cost)


def try_mutant(copy: Path, mutant: Mutant, number: int, order: list[str]) -> None:
    """In a fork, run the tests until one fails, and write its name into `copy`."""
    file = copy / mutant.file
    file.write_bytes(mutant.source(file.read_bytes()))
    os.utime(file, (number, number))  # Python recognises compiled modules by their time
    enter(copy)
    plugin = Ordered(order)
    files = sorted({name.partition("::")[0] for name in order})
    status = run_tests(copy, files, plugin, "-x")
    found = plugin.failed or (f"status {status}" if status else None)
    (copy / "killed_by.json").write_text(json.dumps(found))
    os._exit(0)


class Trials:
    """Runs mutants in parallel, one in each copy of the project."""

    def __init__(self, copies: list[Path], results: Path, reached: Any) -> None:
        self._idle, self._results, self._reached = copies, results, reached
        self._running: dict[int, tuple[Path, Mutant, float]] = {}

    def start(self, mutant: Mutant, number: int) -> None:
        while not self._idle:
            self.wait()
        copy = self._idle.pop()
        (copy / "killed_by.json").unlink(missing_ok=True)
        order = order_for(mutant, self._reached)
        if (pid := os.fork()) == 0:
            try:
                try_mutant(copy, mutant, number, order)
            finally:
                os._exit(1)
        self._running[pid] = copy, mutant, time.monotonic()

    def wait(self) -> None:
        """Wait until one of the running tests has ended."""
        while True:
            for pid, (copy, mutant, begin_s) in list(self._running.items()):
                seconds = time.monotonic() - begin_s
                hung = seconds > LIMIT_S
                if hung or os.waitpid(pid, os.WNOHANG)[0]:
                    self._end(pid, copy, mutant, seconds, hung)
                    return
            time.sleep(0.05)

    def _end(
        self, pid: int, copy: Path, mutant: Mutant, seconds: float, hung: bool
    ) -> None:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if hung:
            os.waitpid(pid, 0)
        del self._running[pid]
        self._idle.append(copy)
        shutil.copy2(PROJECT / mutant.file, copy / mutant.file)
        left = copy / "killed_by.json"
        killed_by = json.loads(left.read_text()) if left.exists() else "hang or crash"
        line = {"mutant": mutant.name, "killed_by": killed_by, "seconds": seconds}
        with self._results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{seconds:6.1f} s  {mutant.name}  {killed_by or 'SURVIVED'}", flush=True)  # noqa: T201

    def finish(self) -> None:
        while self._running:
            self.wait()

    def stop(self) -> None:
        """Kill all running tests when this process ends."""
        for pid in self._running:
            os.killpg(pid, signal.SIGKILL)


def table(drawn: list[Mutant], results: Path) -> str:
    """Return a table of all mutants tried so far, by module."""
    lines = results.read_text().splitlines() if results.exists() else []
    ends = {entry["mutant"]: entry["killed_by"] for entry in map(json.loads, lines)}
    rows = ["| module | mutants | killed | share |", "|---|---|---|---|"]
    tried = [m for m in drawn if m.name in ends]
    for module in [*MODULES, "all"]:
        own = [m for m in tried if module == "all" or m.file == path_of(module)]
        killed = sum(ends[m.name] is not None for m in own)
        share = f"{100 * killed / len(own):.0f} %" if own else ""
        rows.append(f"| {module} | {len(own)} | {killed} | {share} |")
    left = [m.name for m in tried if ends[m.name] is None]
    return "\n".join([*rows, "", *left])


def draw(count: int, seed: int) -> list[Mutant]:
    every = [m for module in MODULES for m in mutants(PROJECT, path_of(module))]
    return random.Random(seed).sample(every, min(count, len(every)))


def prepare(folder: Path, processes: int) -> tuple[list[Path], dict[str, Any]]:
    """Create copies of the project, and return them with the lines that tests reach."""
    copies = [folder / f"copy{number}" for number in range(processes)]
    file = folder / "reached.json"
    if not file.exists():
        shutil.rmtree(folder, ignore_errors=True)
        for name in COPIED:
            copy = shutil.copytree if (PROJECT / name).is_dir() else shutil.copy2
            copies[0].mkdir(parents=True, exist_ok=True)
            copy(PROJECT / name, copies[0] / name)  # type: ignore[operator]
        if (pid := os.fork()) == 0:
            reach(copies[0], file)
        os.waitpid(pid, 0)
        for other in copies[1:]:
            shutil.copytree(copies[0], other, symlinks=True)
    found = json.loads(file.read_text())
    failed = [name for name, test in found["tests"].items() if test["failed"]]
    print("skipped, because they fail on the original source:", failed or "none")  # noqa: T201
    for name in failed:
        del found["tests"][name]
    return copies, found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="")
    options = parser.parse_args(arguments)
    results, drawn = options.results.absolute(), draw(options.count, options.seed)
    for module in PRELOADED:
        importlib.import_module(module)
    copies, reached = prepare(results.with_suffix(".work"), options.processes)
    done = results.read_text() if results.exists() else ""
    tried = {json.loads(line)["mutant"] for line in done.splitlines()}
    trials = Trials(copies, results, reached)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for number, mutant in enumerate(drawn, 1_000_000_000):
            if mutant.name not in tried and options.only in mutant.name:
                trials.start(mutant, number)
        trials.finish()
    finally:
        trials.stop()
    print(table(drawn, results))  # noqa: T201


if __name__ == "__main__":
    main()
