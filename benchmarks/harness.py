"""Harness of all scripts, which runs the compared programs in turns in new processes.

A script defines cases and the programs ("sides") of each case, and calls `main`. A side
is a function that returns metrics by name. The order of the sides is reversed in every
other turn, so that a machine that slows down does not favour one of them. The result is
a table in Markdown, and a JSON file with all runs, the hardware, the versions and the
commit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
MARK = "FIGURES "
"""Start of the line with which the process of a side prints its metrics."""
Figures = dict[str, Any]
Side = Callable[[argparse.Namespace], Figures]
Cases = Mapping[str, Mapping[str, Side]]
"""The sides of each case by name. Ratios compare the first side with the others."""


@dataclass(frozen=True)
class Script:
    """Description of what a script measures."""

    module: str
    """Name of the module for `python -m`."""
    description: str
    cases: Cases
    figure: str = "samples_per_s"
    """The metric that is compared. Each side returns it."""
    checkouts: Mapping[str, str] = field(default_factory=dict)
    """Maps a side to the argument with the checkout from which it imports flatout."""
    small_cases: tuple[str, ...] = ()
    """Cases that are run with `--small`. If there are none, all cases are run."""


def parser_of(script: Script) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {script.module}", description=script.description
    )
    parser.add_argument("--small", action="store_true", help="tiny, for two cores")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument("--cases", nargs="+", choices=list(script.cases))
    parser.add_argument("--without", nargs="+", default=[], help="sides to leave out")
    parser.add_argument("--out", type=Path, default=PROJECT / "build" / "benchmarks")
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)
    return parser


def main(script: Script, parser: argparse.ArgumentParser | None = None) -> int:
    """Run the side that the command line names, or all sides in turns. Return the exit
    code, which is 1 if a side failed."""
    given = (parser or parser_of(script)).parse_args()
    if given.side:
        given.case, name, given.turn = given.side
        found = script.cases[given.case][name](given)
        sys.stdout.write(f"\n{MARK}{json.dumps(found)}\n")
        return 0
    cases = given.cases or (given.small and script.small_cases) or list(script.cases)
    found = {case: _by_turns(script, case, given) for case in cases}
    text = "\n\n".join(_table(case, found[case], script.figure) for case in cases)
    _keep(script, found, text, given.out)
    note = "Small sizes: these results only show that the programs run.\n\n"
    shown = f"{note if given.small else ''}{text}\n\nThe results are in {given.out}."
    sys.stdout.write(f"\n{conditions_text()}\n\n{shown}\n")
    runs = [run for sides in found.values() for own in sides.values() for run in own]
    return int(any("error" in run for run in runs))


def _by_turns(
    script: Script, case: str, given: argparse.Namespace
) -> dict[str, list[Figures]]:
    """Return the metrics of each run, by side. A side that failed is not run again."""
    names = [name for name in script.cases[case] if name not in given.without]
    found: dict[str, list[Figures]] = {name: [] for name in names}

    def measure(job: tuple[int, str]) -> None:
        turn, name = job
        if any("error" in run for run in found[name]):
            return
        argument = script.checkouts.get(name)
        checkout = Path(getattr(given, argument) if argument else PROJECT)
        run = _run(script.module, case, name, turn, checkout, given.out)
        found[name].append({"turn": turn, **run})
        with (given.out / f"{script.module}.jsonl").open("a") as lines:
            lines.write(json.dumps({"case": case, "side": name, **found[name][-1]}))
            lines.write("\n")
        shown = run.get("error") or f"{run[script.figure]:,.4g} {script.figure}"
        _say(f"{case}, turn {turn}, {name}: {shown}")

    turns = range(1, given.turns + 1)
    jobs = [(turn, n) for turn in turns for n in names[:: 1 if turn % 2 else -1]]
    with ThreadPoolExecutor(given.parallel) as pool:
        list(pool.map(measure, jobs))
    return found


def _run(
    module: str, case: str, name: str, turn: int, checkout: Path, out: Path
) -> Figures:
    """Run a side in a new process with the code of `checkout`. The process has the
    thread settings of a flatout training run, which speed up steps on shared cores."""
    from flatout.engine.machine.environment import training_environment
    from flatout.engine.parameters import RuntimeSettings

    places = [str(checkout / "src"), str(PROJECT), os.environ.get("PYTHONPATH", "")]
    out.mkdir(parents=True, exist_ok=True)
    told = [case, name, str(turn)]
    slug = re.sub(r"\W", "-", "-".join([module, *told]))
    log = out / f"{slug}.log"
    begin = time.perf_counter()
    with log.open("w") as target:
        done = subprocess.run(
            [sys.executable, "-m", module, *sys.argv[1:], "--side", *told],
            cwd=PROJECT,
            env={
                **training_environment(RuntimeSettings()),
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, places)),
            },
            stdout=target,
            stderr=subprocess.STDOUT,
            check=False,
        )
    lines = log.read_text(errors="replace").splitlines()
    marked = [line for line in lines if line.startswith(MARK)]
    if done.returncode or not marked:
        last = next((line for line in reversed(lines) if line.strip()), "")
        return {"error": f"exit code {done.returncode}: {last[:200]} (log: {log})"}
    found: Figures = json.loads(marked[-1].removeprefix(MARK))
    return {**found, "process_s": time.perf_counter() - begin}


def _table(case: str, found: Mapping[str, list[Figures]], figure: str) -> str:
    """Return a table with the median, the range and the ratio of each side."""
    lines = [
        f"{case}:",
        "",
        f"| side | {figure}, median | lowest to highest | runs | first / this | more |",
        "|---|---|---|---|---|---|",
    ]
    first = next(iter(found.values()), [])
    for name, runs in found.items():
        if not runs or "error" in runs[-1]:
            fault = runs[-1]["error"] if runs else "not run"
            lines.append(f"| {name} | {fault.replace('|', '/')} | | | | |")
            continue
        values = [run[figure] for run in runs]
        spread = f"{min(values):,.4g} to {max(values):,.4g}"
        lines.append(
            f"| {name} | {median(values):,.4g} | {spread} | {len(values)} | "
            f"{_ratio(first, runs, figure)} | {_more(runs, figure)} |"
        )
    return "\n".join(lines)


def _ratio(first: Sequence[Figures], runs: Sequence[Figures], figure: str) -> str:
    """Return the median and range of the first side's metric divided by this side's in
    the same turn. A slow machine affects both sides of a turn equally."""
    if runs is first or any("error" in run for run in first):
        return ""
    ratios = [a[figure] / b[figure] for a, b in zip(first, runs, strict=False)]
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _more(runs: Sequence[Figures], figure: str) -> str:
    """Return the medians of all other metrics that the runs returned."""
    hidden = {figure, "process_s", "turn"}
    names = [n for n, v in runs[0].items() if isinstance(v, (int, float))]
    return ", ".join(
        f"{name} {median(run[name] for run in runs):.4g}"
        for name in names
        if name not in hidden and all(run.get(name) is not None for run in runs)
    )


def conditions() -> dict[str, Any]:
    """Return the date, the commit, the hardware and the versions."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(PROJECT),
        "hardware": _hardware(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }


def conditions_text() -> str:
    found = conditions()
    versions = ", ".join(map(" ".join, found["versions"].items()))
    start = f"{found['hardware']}, {found['date']}, commit {found['commit']}"
    return f"{start}, {versions}."


def _hardware() -> str:
    import torch

    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return f"{count} x {torch.cuda.get_device_name(0)}"
    file = Path("/proc/cpuinfo")
    names = re.findall("model name.*: (.*)", file.read_text() if file.exists() else "")
    return f"{os.cpu_count()} cores, {(names or [platform.machine()])[0]}"


def _commit(checkout: Path) -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = " with changes" if git("status", "--porcelain", "-uno") else ""
    return (git("rev-parse", "--short", "HEAD") or "unknown") + changed


def _keep(script: Script, found: Mapping[str, Any], text: str, folder: Path) -> None:
    name = script.module.rpartition(".")[2]
    result = {
        "command": [script.module, *sys.argv[1:]],
        **conditions(),
        "figure": script.figure,
        "runs": found,
    }
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1))
    (folder / f"{name}.md").write_text(f"{conditions_text()}\n\n{text}\n")


def _say(text: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()
