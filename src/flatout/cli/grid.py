"""`kedro flatout benchmark`: the benchmark's mode grid by command-line options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import click

from flatout.engine.machine.environment import hide_gpus, nvidia_gpu_count

AXES = {
    "batch_sizes": "batch_sizes",
    "num_workers": "num_workers",
    "precisions": "precisions",
    "prefetch": "prefetch_factors",
    "pin_memory": "pin_memory",
}
"""Options that accept several values, and their parameters under `benchmark`."""


class NoDeviceError(ValueError):
    """A requested device that is missing."""


class ListsCommand(click.Command):
    """A command with `--batch-sizes 128 256 512`: values up to the next option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        names = {f"--{name.replace('_', '-')}" for name in AXES}
        joined: list[str] = []
        collects = False
        for word in (part for arg in args for part in _cut(arg, names)):
            if collects and not re.match(r"-(?!\d)", word):  # -1 is a bad number
                joined[-1] = f"{joined[-1]} {word}".strip()
                continue
            joined += [word, ""] if word in names else [word]
            collects = word in names
        for name, value in pairwise(joined):
            if name in names and not value:
                raise click.UsageError(f"{name} needs at least one value", ctx)
        return super().parse_args(ctx, joined)


def _cut(argument: str, names: set[str]) -> list[str]:
    """Split `--batch-sizes=128` into two words."""
    name, equals, value = argument.partition("=")
    return [name, value] if equals and name in names else [argument]


def grid_parameters(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that correspond to the options."""
    found: dict[str, Any] = {"mode": "grid", "free_global_batch": True}
    found |= {AXES[name]: options[name] for name in AXES if options.get(name)}
    if options.get("steps"):
        found["steps_per_trial"] = options["steps"]
    names = {"name_or_path": options.get("model"), "task": options.get("task")}
    model = {name: value for name, value in names.items() if value}
    return {"benchmark": found} | ({"model": model} if model else {})


def use_device(name: str) -> None:
    """Select a device before other code looks for GPUs. Raises NoDeviceError."""
    if name == "cpu":
        hide_gpus()
    if name == "cuda" and not nvidia_gpu_count():
        raise NoDeviceError("--device cuda: no GPU is seen here; take cpu, or auto")
