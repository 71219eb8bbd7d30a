"""Mode journey: whole commands from the prompt to the saved model, cold and warm,
beside a Trainer script for the same job, by turns.

Cold: nothing is there but the raw data (the script: its rows). Warm: what the cold
command left, tokens and compiled code. A warm run has another seed, so that nothing
that was trained is taken for new.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from flatout.engine.benchmark.journey.commands import WholeRun, timed
from flatout.engine.benchmark.journey.scripts import (
    MODULE,
    SCRIPTS,
    SPLITS,
    no_script,
    script_job,
    write_rows,
)
from flatout.engine.benchmark.runner import Bench
from flatout.engine.benchmark.trials.processes import Answer, resident_limit_bytes
from flatout.engine.benchmark.trials.trial_spec import Planned, TrialResult, TrialSpec
from flatout.engine.files.atomic_write import write_text
from flatout.engine.machine.environment import environment_of_commands
from flatout.engine.parameters import SettingsError
from flatout.engine.tasks import TaskError

FLATOUT = "flatout"
STARTS = ("cold", "warm")
REPORTED = ("samples", "steps", "samples_per_s", "validation_loss", "test_accuracy")
"""Of a train report."""
TIMEOUTS = 12
"""`trial_timeout_s` that a whole command may take."""


@dataclass
class Journey:
    """The commands of one run of the mode, in folders that its turns share."""

    bench: Bench
    command: WholeRun

    def __post_init__(self) -> None:
        self.job = self.bench.files.open(self.bench.settings, self.bench.folder)

    @property
    def alone(self) -> str | None:
        """Why flatout runs alone; None where scripts run beside it."""
        asked = [name for name in self.bench.options.contenders if name in SCRIPTS]
        none = f"benchmark.contenders names neither {' nor '.join(SCRIPTS)}"
        return no_script(self.job) if asked else none

    def run(self) -> None:
        """All turns. A command that fails is not run again; where flatout's own does,
        the journey ends: scripts read what it leaves. Raises OutOfTime."""
        self.bench.answers["journey"] = self.answer
        failed: set[str] = set()
        plan = list(self.plan())
        self.bench.watcher.expect(len(plan))
        for one in plan:
            if one.options["contender"] in failed:
                self.bench.watcher.expect_more(-1)
                continue
            (trial,) = self.bench.run_all([one], more=len(plan) - 1)
            if not trial.ok:
                failed.add(str(one.options["contender"]))
            if FLATOUT in failed:
                return

    def plan(self) -> Iterator[Planned]:
        """The order of contenders turns round from turn to turn."""
        asked = [] if self.alone else self.bench.options.contenders
        names = [FLATOUT, *(name for name in SCRIPTS if name in asked)]
        for turn in range(1, self.bench.options.repeats + 1):
            for name in names if turn % 2 else reversed(names):
                for start in STARTS:
                    label = f"{name}, {start}, turn {turn}"
                    options = {"contender": name, "start": start, "turn": turn}
                    yield Planned("journey", {}, label, options, 1)

    def answer(self, spec: TrialSpec, folder: Path) -> Answer:
        """Run one command, and keep what it answered in `folder`."""
        folder.mkdir(exist_ok=True)
        name, start = str(spec.options["contender"]), str(spec.options["start"])
        home = self.home(name)
        if start == "cold":
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir()
        run = self._flatout if name == FLATOUT else self._script
        try:
            answer = run(spec, home, folder)
        except (TaskError, OSError, ValueError, KeyError) as error:
            answer = Answer("error", f"{type(error).__name__}: {error}", 0.0, {})
        write_text(folder / "answer.json", json.dumps(asdict(answer)))
        return answer

    def home(self, name: str) -> Path:
        """What a contender has made so far; emptied by its cold start."""
        return self.bench.folder / name

    def _flatout(self, spec: TrialSpec, home: Path, folder: Path) -> Answer:
        data, raw = home / "data", self.command.raw
        if not data.exists() and raw.is_dir():
            shutil.copytree(raw, data / raw.name, copy_function=_link)
        data.mkdir(exist_ok=True)
        seed = spec.settings.runtime.seed + STARTS.index(str(spec.options["start"]))
        changes = {
            "data_dir": str(data),
            "runtime": {"seed": seed % 2**32},
            # A killed turn is run again from its beginning.
            "train": {"resume": "never"},
        }
        argv = self.command.argv(folder / "run.yml", changes)
        answer = self._timed(argv, home, folder)
        if answer.status != "ok":
            return answer
        report = json.loads((data / self.command.places["train_report"]).read_text())
        found = {name: report.get(name) for name in REPORTED}
        model = data / self.command.places["model"]
        return _with_phases(answer, report["phases_s"], {**found, "model": str(model)})

    def _script(self, spec: TrialSpec, home: Path, folder: Path) -> Answer:
        name, data = str(spec.options["contender"]), self.home(FLATOUT) / "data"
        made = {entry: data / path for entry, path in self.command.places.items()}
        rows = home / "rows"
        for split in SPLITS:
            write_rows(made[f"{split}_rows"], rows / f"{split}.parquet")
        told = script_job(name, self.job, rows, made, home)
        file = folder / "job.json"
        file.write_text(json.dumps({**told, "started_s": time.time()}, indent=1))
        answer = self._timed([sys.executable, "-m", MODULE, str(file)], home, folder)
        if answer.status != "ok":
            return answer
        found = json.loads(Path(told["result"]).read_text())
        phases_s = found.pop("phases_s")
        return _with_phases(answer, phases_s, {**found, "model": told["model"]})

    def _timed(self, argv: Any, home: Path, folder: Path) -> Answer:
        """Caches that a cold start must not find are the contender's own."""
        compiled = home / "compiled"
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": str(compiled),
            "TRITON_CACHE_DIR": str(compiled / "triton"),
            "HF_DATASETS_CACHE": str(home / "datasets"),
        }
        options = self.bench.options
        return timed(
            argv,
            folder / "log.txt",
            self.command.project,
            environment_of_commands(self.bench.settings.runtime, caches),
            TIMEOUTS * options.trial_timeout_s,
            resident_limit_bytes(options.memory_headroom),
        )

    def summary(self) -> dict[str, Any]:
        """A row a contender and start, seconds by phase; why flatout is alone."""
        trials: dict[tuple[str, str], list[TrialResult]] = {}
        for trial in self.bench.results:
            name, start, _ = trial.label.split(", ")
            trials.setdefault((name, start), []).append(trial)
        rows = [self._row(*key, found) for key, found in trials.items()]
        return {"alone": self.alone, "rows": [_beside(row, rows) for row in rows]}

    def _row(self, name: str, start: str, trials: list[TrialResult]) -> dict[str, Any]:
        good = sorted((t for t in trials if t.ok), key=lambda trial: trial.elapsed_s)
        # Of two turns in the middle the mean: phases still add up to the median.
        middle = good[(len(good) - 1) // 2 : len(good) // 2 + 1]
        figures = [self.bench.figures[trial.trial_id] for trial in middle]
        bad = next((trial for trial in trials if not trial.ok), None)
        last = figures[-1] if figures else {}
        return {
            "name": f"{name}, {start}",
            "contender": name,
            "start": start,
            "turns_s": [trial.elapsed_s for trial in trials if trial.ok],
            "median_s": fmean(t.elapsed_s for t in middle) if middle else None,
            "phases_s": _mean([found["phases_s"] for found in figures]),
            **{k: v for k, v in last.items() if k != "phases_s"},
            "failed": asdict(bad) if bad else None,
        }


def run_journey(bench: Bench, command: WholeRun | None) -> Journey:
    """Raises SettingsError where nobody said what the whole command is."""
    if command is None:
        raise SettingsError(
            "benchmark.mode: journey starts whole commands, which Kedro alone knows: "
            "kedro run --pipelines=benchmark --params=benchmark.mode=journey"
        )
    return Journey(bench, command)


def _link(source: str, target: str) -> None:
    """A second name of a file; a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _with_phases(
    answer: Answer, phases_s: Mapping[str, float], figures: Mapping[str, Any]
) -> Answer:
    """The command's phases, and what the clock outside saw beyond them: its end."""
    end_s = answer.elapsed_s - sum(phases_s.values())
    found = {**figures, "phases_s": {**phases_s, "end": end_s}}
    return Answer(answer.status, answer.note, answer.elapsed_s, found)


def _mean(phases: list[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in phases for name in one)
    return {name: fmean(one.get(name, 0.0) for one in phases) for name in names}


def _beside(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """With its time over that of the fastest script of the same start."""
    scripts = [
        one["median_s"]
        for one in rows
        if one["contender"] != FLATOUT and one["start"] == row["start"]
    ]
    best = min((s for s in scripts if s), default=None)
    ratio = row["median_s"] / best if best and row["median_s"] else None
    return {**row, "over_best_script": ratio}
