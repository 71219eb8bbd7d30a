"""Facts about a run: its name, the tags it starts with, the machine and versions."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

import psutil

from flatout.engine.environment import device_name, nvidia_gpu_count, usable_cores
from flatout.engine.settings import Settings
from flatout.tracking.outbox import RunRecord
from flatout.tracking.store import process_tags

FINAL_METRICS = ("test_accuracy", "test_loss", "validation_accuracy", "validation_loss")
"""Keep their names."""

FIGURES = (
    "samples_per_s",
    "tokens_per_s",
    "padding_pct",
    "mfu_pct",
    "loader_wait_pct",
    "cpu_wait_pct",
    "gpu_clock_mhz",
    "step_ms_p50",
    "peak_reserved_gib",
    "compile_s",
    "train_wall_s",
)
"""Become `report/<name>`, to compare runs by; all others are in the artifact."""

TRIAL_SETTINGS = frozenset(
    {
        "global_batch_size",
        "token_budget",
        "num_workers",
        "prefetch_factor",
        "world_size",
    }
)
"""Numbers of a trial that were set, not measured."""

REPORT_TAGS = (
    "device",
    "precision",
    "attention",
    "strategy",
    "world_size",
    "threads",
    "token_budget",
    "num_workers",
    "compile",
    "cuda_graphs",
    "token_key",
    "resumed_from_step",
    "exit_reason",
)


def run_name(settings: Settings, commit: str | None) -> str:
    """`bert-2x192_cpu_b32_1a2b3c4`: model, device, global batch, commit."""
    config, gpus = settings.model.config, nvidia_gpu_count()
    model = settings.model.name_or_path or "-".join(
        str(part)
        for part in (
            config.get("model_type"),
            "x".join(
                str(config[key])
                for key in ("num_hidden_layers", "hidden_size")
                if key in config
            ),
        )
        if part
    )
    device = f"{gpus}gpu" if gpus else "cpu"
    parts = [Path(model).name, device, f"b{settings.train.global_batch_size}"]
    return plain_name("_".join([*parts, *([commit[:7]] if commit else [])]))


def plain_name(name: str) -> str:
    """`name` with what a browser, a shell or a file system may misread as dashes."""
    return re.sub(r"[^\w.+@-]+", "-", name, flags=re.ASCII).strip("-")[:100] or "run"


def git_state(folder: Path) -> tuple[str | None, bool]:
    """Commit of the project and whether files differ from it; (None, False) without."""
    commit = _git(folder, "rev-parse", "HEAD")
    return commit, bool(commit and _git(folder, "status", "--porcelain"))


def _git(folder: Path, *arguments: str) -> str | None:
    program = shutil.which("git")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def starting_tags(folder: Path, run_params: dict[str, Any]) -> dict[str, str]:
    """Tags of a run that starts now; `run_params` as Kedro's hooks get them."""
    commit, dirty = git_state(folder)
    asked = ("pipeline_names", "runtime_params", "from_nodes", "to_nodes", "tags")
    versions = {name: _version(name) for name in ("torch", "transformers")}
    return {
        **process_tags(),
        "mlflow.user": _user(),
        "mlflow.source.name": " ".join(["kedro", *sys.argv[1:]]),
        "mlflow.source.type": "LOCAL",
        **({"mlflow.source.git.commit": commit} if commit else {}),
        "kedro_env": run_params["env"] or "local",
        **{f"kedro.{key}": str(run_params[key]) for key in asked if run_params[key]},
        "git_commit": commit or "none",
        "git_dirty": str(dirty).lower(),
        "device": device_name(),
        "gpus": str(nvidia_gpu_count()),
        **{f"version.{name}": text for name, text in versions.items()},
        "exit_reason": "running",
    }


def note_tokens(record: RunRecord, inputs: dict[str, Any]) -> None:
    """Token rows of a run, as MLflow's inputs; the train tokens' key as a tag."""
    from flatout.engine.tokenizing.token_keys import token_key

    contexts = {"train_tokens": "training", "validation_tokens": "validation"}
    known = {facts["name"] for facts in record.datasets}
    for name, context in contexts.items():
        tokens = inputs.get(name)
        if tokens is None or name in known:
            continue
        files = tokens.cache_files
        source = str(Path(files[0]["filename"]).parent) if files else "memory"
        key = token_key(tokens)
        record.datasets.append(
            {
                "name": name,
                "digest": key[:36],
                "context": context,
                "source": source,
                "rows": str(len(tokens)),
            }
        )
        if name == "train_tokens":
            record.tags["token_key"] = key


def nested_runs(trials: Any) -> list[dict[str, Any]]:
    """A run a line of the benchmark's table: texts are parameters, numbers metrics."""
    return [_nested_run(row) for row in trials.to_dict("records")]


def _nested_run(row: dict[str, Any]) -> dict[str, Any]:
    present = {k: v for k, v in row.items() if v is not None and v == v}  # noqa: PLR0124
    numbers = {
        k: float(v)
        for k, v in present.items()
        if isinstance(v, (int, float)) and not isinstance(v, bool)
        if k not in TRIAL_SETTINGS and not _is_swept(k)
    }
    texts = {k: str(v)[:500] for k, v in present.items() if k not in numbers}
    failed = row.get("status") not in (None, "ok")
    return {
        "name": plain_name(_trial_name(row)),
        "status": "FAILED" if failed else "FINISHED",
        "params": texts,
        "metrics": numbers,
    }


def _trial_name(row: dict[str, Any]) -> str:
    """`003_packed_8192_b32_w0`: number, strategy, token budget, batch, workers; of a
    sweep `003_learning_rate-0.001`: number and what was swept."""
    columns = (
        ("trial_id", ""),
        ("strategy", ""),
        ("token_budget", ""),
        ("global_batch_size", "b"),
        ("num_workers", "w"),
    )
    parts = [f"{mark}{row[name]}" for name, mark in columns if name in row]
    swept = {name: value for name, value in row.items() if _is_swept(name)}
    parts += [f"{name.rsplit('.')[-1]}-{value}" for name, value in swept.items()]
    return "_".join(parts)


def _is_swept(column: str) -> bool:
    """Settings go by their path in the table of a sweep."""
    return "." in column


def best_metrics(best: dict[str, Any]) -> dict[str, float]:
    """Figures of the sweep's best trial."""
    names = ("validation_loss", "validation_accuracy", "samples_per_s")
    return {f"best_{n}": float(best[n]) for n in names if best[n] is not None}


def pick_metrics(summary: dict[str, Any]) -> dict[str, float]:
    """Rates of the benchmark's picks."""
    return {
        f"{name}_samples_per_s": float(trial["samples_per_s"])
        for name, trial in summary["picks"].items()
        if trial
    }


def verdict_tags(summary: dict[str, Any]) -> dict[str, str]:
    verdict = summary["verdict"]
    return {"bound_by": verdict["bound"]} if verdict else {}


def report_tags(report: dict[str, Any]) -> dict[str, str]:
    """What ran, after all `auto` were settled, and the versions it ran on."""
    tags = {key: str(report[key]) for key in REPORT_TAGS if report.get(key) is not None}
    versions = report.get("versions", {})
    return tags | {f"version.{name}": text for name, text in versions.items() if text}


def report_metrics(report: dict[str, Any]) -> dict[str, float]:
    """Figures of a train report by which runs are compared, under MLflow's names."""
    names = {key: key for key in FINAL_METRICS} | {k: f"report/{k}" for k in FIGURES}
    return {
        name: float(report[key])
        for key, name in names.items()
        if report.get(key) is not None
    }


def write_environment(file: Path) -> None:
    """The machine and the versions of all installed packages, as JSON."""
    packages = {d.metadata["Name"]: d.version for d in distributions()}
    facts = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "usable_cores": usable_cores(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "nvidia_gpus": nvidia_gpu_count(),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(facts, indent=1), encoding="utf-8")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
