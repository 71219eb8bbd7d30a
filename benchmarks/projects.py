"""Run whole flatout commands in separate folders, as a user would type them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import flatout

CHECKOUT = Path(flatout.__file__).resolve().parents[2]
"""The checkout whose code and configuration are used."""


@dataclass(frozen=True)
class Project:
    """A copy of the project's configuration with one additional environment, `job`."""

    folder: Path

    @classmethod
    def make(
        cls,
        folder: Path,
        like: str | None,
        parameters: Mapping[str, Any],
        catalog: Mapping[str, Any] | None = None,
    ) -> Project:
        """Create the environment `job` with these parameters. If `like` names an
        environment, its catalog is copied. If `catalog` is given, it replaces that
        catalog."""
        ignored = shutil.ignore_patterns("local", "tuned", "best")
        shutil.copytree(CHECKOUT / "conf", folder / "conf", ignore=ignored)
        (folder / "conf" / "local").mkdir()
        job = folder / "conf" / "job"
        if like:
            shutil.copytree(folder / "conf" / like, job)
        job.mkdir(exist_ok=True)
        (job / "parameters.yml").write_text(yaml.safe_dump(dict(parameters)))
        if catalog:
            (job / "catalog.yml").write_text(yaml.safe_dump(dict(catalog)))
        return cls(folder)

    def run(self, pipelines: str | None = None, **params: Any) -> float:
        """Run `kedro run`, and return its duration in seconds, measured from outside.
        If it fails, raise RuntimeError with the end of its output."""
        given = {"data_dir": self.folder / "data", **params}
        told = ",".join(f"{name}={value}" for name, value in given.items())
        command = [sys.executable, "-m", "kedro", "run", "--env=job"]
        command += [f"--conf-source={self.folder / 'conf'}", f"--params={told}"]
        command += [f"--pipelines={pipelines}"] if pipelines else []
        return timed(command, self.folder)

    @property
    def report(self) -> dict[str, Any]:
        """Report of the last training run."""
        file = self.folder / "data" / "08_reporting" / "train_report.json"
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def timed(command: list[str], folder: Path) -> float:
    """Run a command with its caches in `folder`, and return its duration in seconds.
    Raises RuntimeError if the command fails."""
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
        "TRITON_CACHE_DIR": str(folder / "compiled" / "triton"),
        "HF_DATASETS_CACHE": str(folder / "datasets"),
    }
    begin = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=CHECKOUT,
        env={**os.environ, **caches},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-3000:]}")
    return seconds
