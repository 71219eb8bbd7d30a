"""Whole commands of flatout in folders of their own, as a user types them."""

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
"""The checkout whose code is imported: its configuration belongs to its code."""


@dataclass(frozen=True)
class Project:
    """The project's configuration with one environment of its own, `job`."""

    folder: Path

    @classmethod
    def make(
        cls,
        folder: Path,
        like: str | None,
        parameters: Mapping[str, Any],
        catalog: Mapping[str, Any] | None = None,
    ) -> Project:
        """`like`: an environment whose catalog `job` takes over; its parameters are
        those given, and `catalog` its only entries."""
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
        """`kedro run`; the seconds that it took, seen from outside. Raises
        RuntimeError with the end of what a command that failed has printed."""
        given = {"data_dir": self.folder / "data", **params}
        told = ",".join(f"{name}={value}" for name, value in given.items())
        command = [sys.executable, "-m", "kedro", "run", "--env=job"]
        command += [f"--conf-source={self.folder / 'conf'}", f"--params={told}"]
        command += [f"--pipelines={pipelines}"] if pipelines else []
        return timed(command, self.folder)

    @property
    def report(self) -> dict[str, Any]:
        """Of the last training."""
        file = self.folder / "data" / "08_reporting" / "train_report.json"
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def timed(command: list[str], folder: Path) -> float:
    """Seconds of a command whose caches lie in `folder`. Raises RuntimeError."""
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
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
