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

from flatout.engine.environment import child_environment

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
    slow_samples_per_s: float
    samples_per_s: float
    ratio: float
    device: str

    def lines(self) -> list[str]:
        return [
            f"{self.steps} steps of {self.global_batch_size} samples on {self.device}",
            f"{self.slow_env:<10} {self.slow_samples_per_s:10.1f} samples/s",
            f"{self.env:<10} {self.samples_per_s:10.1f} samples/s",
            f"{'ratio':<10} {self.ratio:10.1f}",
        ]


def compare(
    project: Path,
    data_dir: Path,
    *,
    env: str,
    slow_env: str,
    global_batch_size: int,
    steps: int,
    tracking_uri: str,
) -> Comparison:
    """Train `steps` steps in `slow_env`, then in `env`. Raises CompareError."""
    reports = {}
    for name in (slow_env, env):
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
        report = folder / "08_reporting" / "train_report.json"
        reports[name] = json.loads(report.read_text(encoding="utf-8"))
        shutil.rmtree(folder)
    slow, fast = reports[slow_env], reports[env]
    result = Comparison(
        global_batch_size=global_batch_size,
        steps=steps,
        slow_env=slow_env,
        env=env,
        slow_samples_per_s=slow["samples_per_s"],
        samples_per_s=fast["samples_per_s"],
        ratio=fast["samples_per_s"] / slow["samples_per_s"],
        device=fast["device"],
    )
    target = data_dir / "08_reporting" / "compare.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(asdict(result), indent=2), encoding="utf-8")
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
