"""Check names given on the command line, and report unknown names in one line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from kedro.config import MissingConfigException
from kedro.framework import project
from kedro.io import DatasetError
from kedro.utils import load_obj

from flatout.engine.parameters import near_or_all
from flatout.places import project_path

WRITTEN_LATER = ("tuned", "best")
"""Environments that are written by pipelines. The configuration loader checks them."""
KEDROS = re.compile(r"Pipeline (does not contain|contains no) ")
"""Matches Kedro's error messages about invalid values of options such as --nodes."""
UNKNOWN_OPTION = re.compile(
    r"unexpected keyword argument '(\w+)'.*Dataset '(.+?)' must .* of '(.+)'", re.S
)
"""Matches Kedro's error message about an unknown option of a catalog entry."""


class CommandError(ValueError):
    """Raised for a command that cannot be run as typed."""


def check_environment(env: str | None, conf_source: str | None = None) -> None:
    """Raise CommandError if `conf_source` (default: conf/) has no folder `env`. The
    environments in WRITTEN_LATER are not checked."""
    conf = Path(conf_source or project_path("conf"))
    known = env is None or env in WRITTEN_LATER or (conf / env).is_dir()
    if known or not conf.is_dir():
        return  # Kedro itself opens an archive of conf/
    names = {path.parent.name for path in conf.glob("*/*.yml")} | {"local"}
    raise CommandError(f"--env: no environment {env}; {near_or_all(str(env), names)}")


def check_data_dir(data_dir: str | None) -> None:
    """Raise CommandError if the folder `data_dir` (default: data) does not exist.
    Without this check, a command that only reads would create the folder."""
    folder = Path(project_path(data_dir or "data"))
    if not folder.is_dir():
        raise CommandError(f"--data-dir: there is no folder {folder}")


def check_pipelines(names: Iterable[str], where: str = "--pipelines") -> None:
    """Raise CommandError if a pipeline in `names` does not exist. flatout's pipelines
    are not imported. `where` is the option or parameter that the message mentions."""
    folders = resources.files("flatout.pipelines").iterdir()
    known = {folder.name for folder in folders if (folder / "__init__.py").is_file()}
    if project.PACKAGE_NAME not in (None, "flatout"):
        known |= set(project.pipelines)
    for name in names:
        if name not in known | {"__default__"}:
            raise CommandError(
                f"{where}: no pipeline {name}; {near_or_all(name, known)}"
            )


def check_command(options: Mapping[str, Any]) -> None:
    """Raise CommandError if the environment or a pipeline in the options of `kedro run`
    does not exist."""
    check_environment(options["env"], options["conf_source"])
    names = options.get("pipelines") or [options.get("pipeline")]
    check_pipelines([name for name in names if name] or ["__default__"])


def plain_error(error: Exception) -> Exception | None:
    """Return an error whose message is enough for a user, or None if `error` cannot be
    understood without its traceback."""
    own = type(error).__module__.startswith("flatout.")
    if found := UNKNOWN_OPTION.search(str(error)):
        return _option_error(*found.groups())
    if own or isinstance(error, (DatasetError, MissingConfigException)):
        return error
    is_kedros = isinstance(error, ValueError) and KEDROS.match(str(error))
    is_yaml = isinstance(error, yaml.MarkedYAMLError)
    if not (is_kedros or is_yaml):
        return None
    return CommandError(" ".join(f"{error} {error.__cause__ or ''}".split()))


def _option_error(option: str, entry: str, kind: str) -> CommandError:
    near = near_or_all(option, inspect.signature(load_obj(kind)).parameters)
    return CommandError(
        f"catalog: {entry}: {kind} has no option {option!r}: correct or remove it in "
        f"conf/; {near}"
    )
