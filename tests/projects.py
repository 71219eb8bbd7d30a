"""Copies of the project's configuration, commands that succeed or are interrupted, and
access to the runs and contexts of commands."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from kedro.framework.context import KedroContext
from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project
from mlflow import MlflowClient
from omegaconf import OmegaConf

from tests import warm
from tests.conftest import PROJECT, kedro


def copied_conf(folder: Path) -> Path:
    """Copy conf/ into `folder`, without settings of this machine and its user."""
    others = shutil.ignore_patterns("local", "tuned", "best")
    return Path(shutil.copytree(PROJECT / "conf", folder / "conf", ignore=others))


def write_environment(
    conf: Path, name: str, parameters: Mapping[str, Any], catalog: Mapping[str, Any]
) -> None:
    """Write an environment that adds parameters and entries to those of conf/test."""
    (conf / name).mkdir(exist_ok=True)
    known = OmegaConf.load(PROJECT / "conf/test/parameters.yml")
    both = OmegaConf.merge(known, dict(parameters))
    OmegaConf.save(both, conf / name / "parameters.yml")
    (conf / name / "catalog.yml").write_text(yaml.dump(dict(catalog)))


def context_of(env: str | None = None, **options: Any) -> KedroContext:
    """Return the context of a session with these options of `KedroSession.create`."""
    bootstrap_project(PROJECT)
    return KedroSession.create(PROJECT, env=env, **options).load_context()


def ran(*arguments: str, cwd: Path = PROJECT, **variables: str) -> str:
    """Return the output of `kedro ...`, which must succeed."""
    done = kedro(*arguments, cwd=cwd, **variables)
    assert done.returncode == 0, done.stdout
    return done.stdout


def interrupted(
    arguments: list[str],
    log: Path,
    reached: Callable[[], object],
    signum: int,
    cwd: Path = PROJECT,
    **variables: str,
) -> int:
    """Start `kedro ...`, send it `signum` once `reached()` is true, and return its exit
    code."""
    process = warm.start(arguments, log, cwd, variables)
    try:
        while not reached() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signum)
        return process.wait(60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def runs_of(store: str | Path) -> list[Any]:
    """Return the runs in a tracking store, given by its URI or its data folder."""
    uri = store if isinstance(store, str) else f"sqlite:///{store}/mlflow.db"
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("flatout")
    return list(client.search_runs([experiment.experiment_id]))
