"""Mode journey: whole commands from the prompt to the saved model, cold and warm,
beside a Trainer script for the same job, by turns.

Cold: nothing is there but the raw data (the script: its rows). Warm: what the cold
command left, tokens and compiled code. A warm run has another seed, so that nothing
that was trained is taken for new.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flatout.engine.benchmark.journey.commands import WholeRun, timed
from flatout.engine.benchmark.journey.rows import FLATOUT, journey_rows
from flatout.engine.benchmark.journey.scripts import (
    MODULE,
    SCRIPTS,
    SPLITS,
    no_script,
    script_job,
    script_variables,
    write_rows,
)
from flatout.engine.benchmark.runner import PEER_TIMEOUTS, Bench
from flatout.engine.benchmark.trials.processes import Answer, resident_limit_bytes
from flatout.engine.benchmark.trials.trial_spec import Planned, TrialSpec
from flatout.engine.files.atomic_write import write_text
from flatout.engine.machine.environment import environment_of_commands
from flatout.engine.parameters import SettingsError
from flatout.engine.tasks import TaskError
from flatout.engine.train.setup.job import TrainJob

STARTS = ("cold", "warm")
REPORTED = ("samples", "steps", "samples_per_s", "validation_loss", "test_accuracy")
"""Of a train report."""


@dataclass
class Journey:
    """The commands of one run of the mode, in folders that its turns share."""

    bench: Bench
    command: WholeRun

    @cached_property
    def job(self) -> TrainJob:
        return self.bench.files.open(self.bench.settings, self.bench.folder)

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
            trial = self.bench.run(one.kind, label=one.label, options=one.options)
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
        except (TaskError, OSError, ValueError) as error:
            answer = Answer("error", f"{type(error).__name__}: {error}", 0.0, {})
        write_text(folder / "answer.json", json.dumps(asdict(answer)))
        return answer

    def home(self, name: str) -> Path:
        """What a contender has made so far; emptied by its cold start."""
        return self.bench.folder / name

    def _flatout(self, spec: TrialSpec, home: Path, folder: Path) -> Answer:
        data, raw = home / "data", self.command.raw
        if not data.exists() and raw.is_dir():
            shutil.copytree(raw, data / raw.name)  # a command may write there
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
        report = json.loads(self._made("train_report").read_text(encoding="utf-8"))
        found = {name: report.get(name) for name in REPORTED}
        model = str(self._made("model"))
        return _with_phases(answer, report["phases_s"], {**found, "model": model})

    def _script(self, spec: TrialSpec, home: Path, folder: Path) -> Answer:
        name, rows = str(spec.options["contender"]), home / "rows"
        for split in SPLITS:
            write_rows(self._made(f"{split}_rows"), rows / f"{split}.parquet")
        made = {entry: self._made(entry) for entry in ("tokenizer", "model")}
        told = script_job(name, self.job, rows, made, home)
        file = folder / "job.json"
        file.write_text(json.dumps({**told, "started_s": time.time()}, indent=1))
        command = [sys.executable, "-m", MODULE, str(file)]
        variables = script_variables(name, spec.settings.runtime)
        answer = self._timed(command, home, folder, variables)
        if answer.status != "ok":
            return answer
        found = json.loads(Path(told["result"]).read_text())
        phases_s = found.pop("phases_s")
        return _with_phases(answer, phases_s, {**found, "model": told["model"]})

    def _made(self, entry: str) -> Path:
        """What flatout's last run has left. Raises TaskError."""
        if entry not in self.command.places:
            raise TaskError(f"the entry {entry} of the catalog has no filepath to read")
        return self.home(FLATOUT) / "data" / self.command.places[entry]

    def _timed(
        self,
        argv: Sequence[str],
        home: Path,
        folder: Path,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> Answer:
        """Caches that a cold start must not find are the contender's own."""
        compiled = home / "compiled"
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": str(compiled),
            "TRITON_CACHE_DIR": str(compiled / "triton"),
            "HF_DATASETS_CACHE": str(home / "datasets"),
            **variables,
        }
        options = self.bench.options
        return timed(
            argv,
            folder / "log.txt",
            self.command.project,
            environment_of_commands(self.bench.settings.runtime, caches),
            PEER_TIMEOUTS * options.trial_timeout_s,
            resident_limit_bytes(options.memory_headroom),
        )

    def summary(self) -> dict[str, Any]:
        """A row a contender and start, seconds by phase; why flatout is alone."""
        rows = journey_rows(self.bench.results, self.bench.figures)
        return {"alone": self.alone, "rows": rows}


def run_journey(bench: Bench, command: WholeRun | None) -> Journey:
    """Raises SettingsError where nobody said what the whole command is."""
    if command is None:
        raise SettingsError(
            "benchmark.mode: journey starts whole commands, which Kedro alone knows: "
            "kedro run --pipelines=benchmark --params=benchmark.mode=journey"
        )
    return Journey(bench, command)


def _with_phases(
    answer: Answer, phases_s: Mapping[str, float], figures: Mapping[str, Any]
) -> Answer:
    """The command's phases, and what the clock outside saw beyond them: its end."""
    end_s = answer.elapsed_s - sum(phases_s.values())
    found = {**figures, "phases_s": {**phases_s, "end": end_s}}
    return Answer(answer.status, answer.note, answer.elapsed_s, found)
