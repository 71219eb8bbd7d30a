"""Entry point of `flatout` and `python -m flatout`. Both accept the options of `kedro
run`, and also work from an installed wheel."""

from __future__ import annotations

import sys
from typing import Any

from kedro.framework.cli.utils import find_run_command
from kedro.framework.project import configure_project

from flatout.engine.machine.environment import set_defaults
from flatout.project.terminal import print_lines


def main(*args: Any, **kwargs: Any) -> Any:
    print_lines()
    # In a checkout, the file .telemetry turns telemetry off. A wheel has no such file.
    set_defaults({"DO_NOT_TRACK": "1"})
    configure_project("flatout")
    kwargs["standalone_mode"] = not hasattr(sys, "ps1")
    return find_run_command("flatout")(*args, **kwargs)


if __name__ == "__main__":
    main()
