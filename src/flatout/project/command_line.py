"""Checks of names on the command line, with one-line errors for unknown ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from kedro.config import MissingConfigException
from kedro.framework.project import pipelines
from kedro.io import DatasetError
from kedro.pipeline import Pipeline

from flatout.engine.parameters import near_or_all
from flatout.places import project_path
from flatout.project.fitting import short_names

WRITTEN_LATER = "tuned"
"""The environment that a benchmark writes: it may be missing."""
BEST = "best"
"""The environment that a sweep writes."""
NO_SUCH = re.compile(r"Pipeline does not contain (nodes|datasets) named (\[.*\])")


class CommandError(ValueError):
    """A command that cannot be carried out as typed."""


def check_environment(env: str | None, conf_source: str | None = None) -> None:
    """Raises CommandError unless conf/ has a folder of this name."""
    conf = Path(conf_source or project_path("conf"))
    if env in (None, WRITTEN_LATER) or not conf.is_dir() or (conf / str(env)).is_dir():
        return  # an archive of settings is opened by Kedro
    if env == BEST:
        raise CommandError(
            f"--env: {conf / BEST} is not there yet: kedro run --pipelines=sweep "
            "writes it"
        )
    known = {path.parent.name for path in conf.glob("*/*.yml")} | {"local"}
    raise CommandError(f"--env: no environment {env}; {near_or_all(str(env), known)}")


def check_data_dir(data_dir: str | None) -> None:
    """Raises CommandError if the folder does not exist: reading it would create it."""
    folder = Path(project_path(data_dir or "data"))
    if not folder.is_dir():
        raise CommandError(f"--data-dir: there is no folder {folder}")


def check_pipelines(names: Iterable[str], where: str = "--pipelines") -> None:
    """Raises CommandError for unknown pipelines; imports no pipeline."""
    folders = resources.files("flatout.pipelines").iterdir()
    known = {folder.name for folder in folders if (folder / "__init__.py").is_file()}
    for name in names:
        if name not in known | {"__default__"}:
            raise CommandError(
                f"{where}: no pipeline {name}; {near_or_all(name, known)}"
            )


def check_command(options: Mapping[str, Any]) -> None:
    """Check the options of `kedro run`. Raises CommandError."""
    check_environment(options["env"], options["conf_source"])
    check_pipelines(_asked(options))


def plain_error(error: Exception, options: Mapping[str, Any]) -> Exception | None:
    """Return an error whose text is all that a user needs; None if only a traceback
    explains it."""
    own = type(error).__module__.startswith("flatout.")
    if own or isinstance(error, (DatasetError, MissingConfigException)):
        return error
    if isinstance(error, yaml.MarkedYAMLError):
        return CommandError(_yaml_fault(error))
    return _filter_fault(error, options) if isinstance(error, ValueError) else None


def _asked(options: Mapping[str, Any]) -> list[str]:
    names = options.get("pipelines") or [options.get("pipeline")]
    return [name for name in names if name] or ["__default__"]


def _yaml_fault(error: yaml.MarkedYAMLError) -> str:
    """Kedro's error names the file, and the parser's error the place and the fault."""
    file = re.search(r"file (\S+),", str(error))
    cause = error.__cause__ if file else error
    mark = getattr(cause, "problem_mark", None)
    line = f", line {mark.line + 1}" if mark else ""
    problem = getattr(cause, "problem", None) or str(error)
    return (
        f"{file[1] if file else 'a file in conf/'}{line}: no valid YAML: {problem}. "
        "Look at the indentation, the quotes and the colons there and one line above"
    )


def _filter_fault(error: ValueError, options: Mapping[str, Any]) -> Exception | None:
    """Explain errors of --nodes, --from-nodes, --to-outputs, --tags and the like."""
    if str(error).startswith("Pipeline contains no nodes"):
        return CommandError("no node is left to run: --tags and the like drop them all")
    found = NO_SUCH.match(str(error))
    if not found:
        return None
    whole = sum((pipelines[name] for name in _asked(options)), start=Pipeline([]))
    of_nodes = found[1] == "nodes"
    known = short_names(whole) if of_nodes else whole.datasets()
    missing = yaml.safe_load(found[2])
    kind = "node" if of_nodes else "data set"
    hints = [f"no {kind} {name}; {near_or_all(name, known)}" for name in missing]
    return CommandError(f"in {', '.join(_asked(options))}: {'; '.join(hints)}")
