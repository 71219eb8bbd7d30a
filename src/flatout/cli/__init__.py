"""Kedro's commands for this project: `run` with plain errors, and `flatout ...`."""

from flatout.cli import looking, own_data, run, trainings  # noqa: F401
from flatout.cli.groups import cli, flatout

__all__ = ["cli", "flatout"]
