"""Terminal output: one line per message, without warnings that do not help.

`set_up_terminal` is an entry point of the group `kedro.init`: Kedro calls it before it
loads plugins, in every project of this Python environment.
"""

from __future__ import annotations

import logging
from pathlib import Path

import rich
from kedro.logging import RichHandler
from kedro.utils import find_kedro_project
from rich.text import Text

from flatout.tracking.program import LevelFormatter

SILENCED = (
    # Kedro still uses the older name of OmegaConf's register_resolver.
    "register_new_resolver() is deprecated",
    # MLflow's advice on models; `kedro flatout sync` sends a model.
    "An input example was not provided",
    # Advice that every run repeats; training reads its rows from mapped files anyway.
    "Using synchronous mode for loading and saving data",
    # Kedro's runners print this above every error of a run's first node.
    "No nodes ran. Repeat the previous command",
    # The same command resumes automatically: current results are not made again.
    "nodes that have not run.\nYou can resume the pipeline run",
    # The command ends with the error itself.
    "failed with error: ",
    # Entries of Kedro's own types are wrapped to accept the results of nodes.
    "Replacing dataset '",
    # Kedro-Viz prints this in every run of some pipelines.
    "Workflow tracking is disabled",
)
LOGGERS = (
    "py.warnings",
    "kedro.io.data_catalog",
    "kedro.pipeline.node",
    "kedro.runner.sequential_runner",
    "kedro.runner.thread_runner",
    "kedro.runner.parallel_runner",
    "kedro_viz.integrations.kedro.run_hooks",
)
STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "red"}
KEDRO = ("kedro", "kedro.io.data_catalog", "kedro.pipeline.node")


class LineHandler(logging.Handler):
    """Print one line per message on Rich's console. A terminal wraps long messages
    between words; Rich's own handler would wrap at 80 columns without a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(LevelFormatter("%(asctime)s  %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            console = rich.get_console()
            styled = Text(self.format(record), STYLES.get(record.levelno, ""))
            console.print(styled, soft_wrap=not console.is_terminal)
        except Exception:
            self.handleError(record)


def show_kedro() -> None:
    """Show Kedro's own messages too: one line per node, load and save."""
    for name in KEDRO:
        logging.getLogger(name).setLevel(logging.INFO)


def set_up_terminal() -> None:
    """Print messages as lines if the project is flatout or depends on it."""
    root = find_kedro_project(Path.cwd())
    if root and "flatout" in (root / "pyproject.toml").read_text(encoding="utf-8"):
        print_lines()


def print_lines() -> None:
    """Print messages as lines instead of by Kedro's handler; custom handlers stay."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, RichHandler)]:
        root.removeHandler(handler)
        root.addHandler(LineHandler())
    # The loggers of Python's warnings. A filter of `warnings` would not work: MLflow
    # inserts its own filter before all others.
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not any(silenced in text for silenced in SILENCED)
