"""Kedro commands of this project: `run` with readable errors, and `flatout ...`."""

from flatout.cli import answers, grid, looking, own_data, publishing  # noqa: F401
from flatout.cli.groups import cli, flatout
from flatout.cli.run import run

__all__ = ["cli", "flatout", "run"]
