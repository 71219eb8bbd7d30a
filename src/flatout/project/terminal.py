"""What a terminal shows: a line a message, without warnings that help nobody.

`set_up_terminal` is an entry point of the group `kedro.init`: Kedro calls it before it
loads plugins.
"""

from __future__ import annotations

import logging
import textwrap
from functools import partial

import rich
from kedro.logging import RichHandler
from rich.text import Text

from flatout.tracking.program import LevelFormatter

SILENCED = (
    # Kedro still uses the older name of OmegaConf's register_resolver.
    "register_new_resolver() is deprecated",
    # MLflow's advice on models, of which `kedro flatout sync` sends one.
    "An input example was not provided",
    # The advice of every run; training reads its rows from mapped files anyhow.
    "Using synchronous mode for loading and saving data",
    # Of Kedro's runners, above every error of a run's first node.
    "No nodes ran. Repeat the previous command",
    # The same command goes on by itself: what is current is not made again.
    "nodes that have not run.\nYou can resume the pipeline run",
    # The error itself is what the command ends with.
    "failed with error: ",
    # Of Kedro-Viz, in every run of some pipelines.
    "Workflow tracking is disabled",
)
LOGGERS = (
    "py.warnings",
    "kedro.pipeline.node",
    "kedro.runner.sequential_runner",
    "kedro.runner.thread_runner",
    "kedro.runner.parallel_runner",
    "kedro_viz.integrations.kedro.run_hooks",
)
STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "red"}
KEDRO = ("kedro", "kedro.io.data_catalog", "kedro.pipeline.node")


INDENT = 10
"""Columns of the time of day, and the space behind it."""


class LineHandler(logging.Handler):
    """One line a message, on the console that draws the progress line. In a terminal
    what is longer goes on below the text; Rich's own handler wraps at 80 columns where
    there is no terminal."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(LevelFormatter("%(asctime)s  %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            console, text = rich.get_console(), self.format(record)
            if console.is_terminal:
                text = wrapped(text, console.width)
            styled = Text(text, STYLES.get(record.levelno, ""))
            console.print(styled, soft_wrap=True)
        except Exception:
            self.handleError(record)


def wrapped(text: str, width: int) -> str:
    """Between words only: what is longer, as a path, can still be copied whole."""
    wrap = partial(
        textwrap.fill,
        width=width,
        subsequent_indent=" " * INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(
        line if len(line) <= width else wrap(line) for line in text.split("\n")
    )


def show_kedro() -> None:
    """Kedro's own lines too: a line for each node, load and save."""
    for name in KEDRO:
        logging.getLogger(name).setLevel(logging.INFO)


def set_up_terminal() -> None:
    """Messages as lines, in place of Kedro's handler; a handler of one's own stays."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, RichHandler)]:
        root.removeHandler(handler)
        root.addHandler(LineHandler())
    # Where Kedro logs Python's warnings. Not a filter of `warnings`: MLflow puts one of
    # its own before all others.
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not any(silenced in text for silenced in SILENCED)
