"""Warnings of libraries that no user of flatout can act on, silenced by their text.

An entry point of the group `kedro.init`: Kedro calls it before it loads plugins.
"""

from __future__ import annotations

import logging

from flatout.engine.machine.environment import set_defaults

SILENCED = (
    # kedro-mlflow defines a `predict` without type hints: shown at every command.
    "Add type hints to the `predict` method",
    # Kedro and kedro-mlflow still use the older name of OmegaConf's register_resolver.
    "register_new_resolver() is deprecated",
    # The advice of every run; training reads its rows from mapped files anyhow.
    "Using synchronous mode for loading and saving data",
    # Of Kedro's runners, above every error of a run's first node.
    "No nodes ran. Repeat the previous command",
)
LOGGERS = (
    "py.warnings",
    "kedro.runner.sequential_runner",
    "kedro.runner.thread_runner",
    "kedro.runner.parallel_runner",
)


def silence_known_warnings() -> None:
    """Drop them where Kedro logs Python's warnings.

    Not a filter of `warnings`: MLflow puts one of its own before all others.
    """
    # Without git (a container has none) MLflow tells so in 48 lines a training.
    set_defaults({"GIT_PYTHON_REFRESH": "quiet"})
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not any(silenced in text for silenced in SILENCED)
