"""Print log messages in the terminal, one per line, and hide unhelpful warnings.

`set_up_terminal` is an entry point of the group `kedro.init`. Kedro calls it before it
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
    # MLflow gives this advice when a model is logged, e.g. by `kedro flatout sync`.
    "An input example was not provided",
    # This recommends asynchronous loading, but training reads memory-mapped files.
    "Using synchronous mode for loading and saving data",
    # Kedro's runners print this above every error in the first node of a run.
    "No nodes ran. Repeat the previous command",
    # The same command resumes the run anyway, because current results are reused.
    "nodes that have not run.\nYou can resume the pipeline run",
    # The command prints the error itself at the end.
    "failed with error: ",
    # This is intended: entries of Kedro's own types are wrapped to accept nodes'
    # results.
    "Replacing dataset '",
    # Kedro-Viz prints this in every partial run, e.g. with --pipelines.
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
    """Logging handler that prints one line per message on Rich's console. In a
    terminal, long messages wrap between words. Elsewhere they do not wrap. (Rich's own
    handler would wrap them at 80 columns.)"""

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
    """Make Kedro's loggers show one line per node, loaded entry and saved entry."""
    for name in KEDRO:
        logging.getLogger(name).setLevel(logging.INFO)


def set_up_terminal() -> None:
    """Call `print_lines` if the working directory is in a Kedro project whose
    pyproject.toml mentions flatout."""
    root = find_kedro_project(Path.cwd())
    if root and "flatout" in (root / "pyproject.toml").read_text(encoding="utf-8"):
        print_lines()


def print_lines() -> None:
    """Replace Kedro's log handler with a LineHandler, and hide the messages in
    SILENCED. Handlers that are not a `RichHandler` are kept."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, RichHandler)]:
        root.removeHandler(handler)
        root.addHandler(LineHandler())
    # Some messages are Python warnings. A filter in `warnings` would not work, because
    # MLflow inserts its own filter before all others.
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not any(silenced in text for silenced in SILENCED)
