"""Basic information about a run: its name, initial tags and parameters."""

from __future__ import annotations

import getpass
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from flatout.engine.machine.environment import device_name, nvidia_gpu_count
from flatout.engine.parameters import Settings, SettingsModel
from flatout.engine.parameters.common import by_path
from flatout.engine.parameters.secrets import without_password
from flatout.tracking.store import process_tags

PARAMETERS = "params:"
NOT_IN_NAMES = re.compile(r"[^/\w.\- :]")
"""Matches characters that MLflow does not allow in parameter names."""


def run_name(data: str, settings: Settings | None = None, kind: str = "") -> str:
    """Return a run name such as `reviews_bert-2x128_lr1e-3`. It consists of the name of
    the data, the model, and either the `kind` of run or the learning rate. If
    `settings` is None, the name has the form `data_reviews`."""
    if settings is None:
        return plain_name("_".join(filter(None, ["data", data])))
    digits, power = f"{settings.train.peak_learning_rate:.2e}".split("e")
    last = kind or f"lr{digits.rstrip('0').rstrip('.')}e{int(power)}"
    return plain_name("_".join(filter(None, [data, _model_name(settings), last])))


def _model_name(settings: Settings) -> str:
    """Return the checkpoint's name, or the model type and size, e.g. `bert-2x128`."""
    if settings.model.name_or_path:
        return Path(settings.model.name_or_path).name
    config = settings.model.config
    sizes = [config.get(key) for key in ("num_hidden_layers", "hidden_size")]
    shape = "x".join(str(size) for size in sizes if size)
    return "-".join(str(part) for part in (config.get("model_type"), shape) if part)


def plain_name(name: str) -> str:
    """Return `name` with dashes instead of characters that browsers, shells or file
    systems may misread."""
    return re.sub(r"[^\w.+@-]+", "-", name, flags=re.ASCII).strip("-")[:100] or "run"


def _git(folder: Path, *arguments: str) -> str | None:
    command = [shutil.which("git") or "git", *arguments]
    given = {"cwd": folder, "capture_output": True, "text": True, "timeout": 5}
    try:
        return subprocess.run(command, check=True, **given).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git, or no repository
        return None


def starting_tags(folder: Path, run_params: dict[str, Any]) -> dict[str, str]:
    """Return the initial tags of a run, such as its process, user, command, commit and
    device. `folder` is the project, and `run_params` are those of Kedro's hooks."""
    commit = _git(folder, "rev-parse", "HEAD")
    is_dirty = bool(commit and _git(folder, "status", "--porcelain"))
    asked = ("pipeline_names", "runtime_params", "from_nodes", "to_nodes", "tags")
    given = {name: run_params[name] for name in asked}
    return {
        **process_tags(),
        "mlflow.user": _user(),
        "mlflow.source.name": without_password(" ".join(["kedro", *sys.argv[1:]])),
        "mlflow.source.type": "LOCAL",
        **({"mlflow.source.git.commit": commit} if commit else {}),
        "kedro_env": run_params["env"] or "local",
        **{f"kedro.{k}": without_password(str(v)) for k, v in given.items() if v},
        "git_commit": commit or "none",
        "git_dirty": str(is_dirty).lower(),
        "device": device_name(),
        "gpus": str(nvidia_gpu_count()),
        "exit_reason": "running",
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # in a container, the user may have no name
        return "unknown"


def flat_parameters(inputs: dict[str, Any]) -> dict[str, str]:
    """Return the parameters among a node's `inputs` as strings, keyed by path, such as
    `train.loader.num_workers`. Kedro passes some groups as settings objects."""
    groups = {
        name.removeprefix(PARAMETERS): (
            value.model_dump() if isinstance(value, SettingsModel) else value
        )
        for name, value in inputs.items()
        if name.startswith(PARAMETERS)
    }
    return {
        NOT_IN_NAMES.sub("_", name): without_password(str(value))
        for name, value in by_path(groups)
        if value != {}
    }
