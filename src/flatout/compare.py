"""The slow configuration against another, by real runs on the same tokens.

Each run is a `kedro run` of its own, one after the other, in a folder of its own that
shares the tokens: the user's model and report stay as they are.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from flatout.engine.machine.environment import child_environment

SHARED = (
    "05_model_input",
    "06_models/tokenizer",
    "06_models/label_names.json",
)


class CompareError(RuntimeError):
    """A run that did not end well; the text holds the end of its output."""

    exit_code = 1


@dataclass(frozen=True)
class Comparison:
    """Training rates of two environments; samples/s over `steps` steps each."""

    global_batch_size: int
    steps: int
    slow_env: str
    env: str
    slow_rates: list[float]
    """Samples/s, a training each."""
    rates: list[float]
    device: str

    @property
    def ratio(self) -> float:
        """Of the medians."""
        return median(self.rates) / median(self.slow_rates)

    def lines(self) -> list[str]:
        times = f", {len(self.rates)} times by turns" if len(self.rates) > 1 else ""
        work = f"{self.steps} steps of {self.global_batch_size} samples"
        return [
            f"{work} on {self.device}{times}",
            _line(self.slow_env, self.slow_rates),
            _line(self.env, self.rates),
            f"{'ratio':<10} {self.ratio:10.1f}",
        ]


def _line(name: str, rates: list[float]) -> str:
    spread = f"  ({min(rates):.1f} to {max(rates):.1f})" if len(rates) > 1 else ""
    return f"{name:<10} {median(rates):10.1f} samples/s{spread}"


def compare(
    project: Path,
    data_dir: Path,
    *,
    env: str,
    slow_env: str,
    global_batch_size: int,
    steps: int,
    repeats: int,
    tracking_uri: str,
) -> Comparison:
    """Train `steps` steps in `slow_env`, then in `env`; `repeats` times, so that a busy
    minute meets both. Raises CompareError."""
    rates: dict[str, list[float]] = {slow_env: [], env: []}
    device = ""
    for name in [slow_env, env] * repeats:
        folder = _fresh_folder(data_dir, name)
        parameters = {
            "data_dir": folder,
            "train.global_batch_size": global_batch_size,
            "train.max_steps": steps,
            "train.resume": "never",
            "guard.enabled": False,  # that one of the two is slow is the point
            "tracking.log_model": False,  # so few steps make no champion
        }
        _kedro_train(project, name, parameters, tracking_uri)
        file = folder / "08_reporting" / "train_report.json"
        report = json.loads(file.read_text(encoding="utf-8"))
        rates[name].append(report["samples_per_s"])
        device = report["device"]
        shutil.rmtree(folder)
    result = Comparison(
        global_batch_size=global_batch_size,
        steps=steps,
        slow_env=slow_env,
        env=env,
        slow_rates=rates[slow_env],
        rates=rates[env],
        device=device,
    )
    target = data_dir / "08_reporting" / "compare.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    stored = {**asdict(result), "ratio": result.ratio}
    target.write_text(json.dumps(stored, indent=2), encoding="utf-8")
    return result


def has_tokens(data_dir: Path) -> bool:
    return all((data_dir / name).exists() for name in SHARED)


def _fresh_folder(data_dir: Path, name: str) -> Path:
    """`compare-<name>` beside the data's own folders, with links to the tokens."""
    folder = data_dir / f"compare-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    for shared in SHARED:
        link = folder / shared
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to((data_dir / shared).resolve())
    return folder


def _kedro_train(
    project: Path, env: str, parameters: dict[str, object], tracking_uri: str
) -> None:
    given = ",".join(f"{key}={value}" for key, value in parameters.items())
    command = [sys.executable, "-m", "kedro", "run", "--pipelines=train"]
    done = subprocess.run(
        [*command, f"--env={env}", f"--params={given}"],
        cwd=project,
        env=child_environment({"MLFLOW_TRACKING_URI": tracking_uri}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        tail = os.linesep.join(done.stdout.splitlines()[-30:])
        raise CompareError(
            f"kedro run --env={env} ended with {done.returncode}:\n{tail}"
        )
