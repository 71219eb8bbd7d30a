"""conf/best: the settings of the training that won a sweep."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from flatout.engine.files.atomic_write import write_text
from flatout.engine.parameters.common import set_by_path

HEAD = """\
# Written by kedro flatout best; the next one writes it again.
# Train with it: kedro run --env=best
"""


class NoSweepError(ValueError):
    """No sweep has ended in this data folder."""


def read_best(data: Path) -> dict[str, Any]:
    """What the last sweep under `data` found. Raises NoSweepError."""
    file = data / "08_reporting" / "sweep_best.json"
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        _ = [found[n] for n in ("trial_id", "settings", "trials", found["chosen_by"])]
    except FileNotFoundError:
        raise NoSweepError(_no_winner(file)) from None
    except (ValueError, TypeError, KeyError):
        raise NoSweepError(
            f"{file} is empty or torn, as a full disk leaves it. Run the same sweep "
            "again: kedro run --pipelines=sweep writes the file and trains nothing "
            "that has ended well"
        ) from None
    return found


def set_aside(file: Path) -> None:
    """Where a sweep begins: `file` has the winner of another, and goes beside it."""
    if file.is_file():
        file.replace(_earlier(file))


def _earlier(file: Path) -> Path:
    return file.with_suffix(f".earlier{file.suffix}")


def _no_winner(file: Path) -> str:
    if not _earlier(file).is_file():
        return f"{file} is not there: kedro run --pipelines=sweep writes it"
    return (
        f"the last sweep has no winner, {file} is not there: it still runs, was "
        "stopped or refused, or no trial ended well. kedro run --pipelines=sweep goes "
        f"on with it. The winner of an earlier one is in {_earlier(file).name}"
    )


def write_best(conf: Path, best: Mapping[str, Any]) -> Path:
    """best/parameters.yml in the folder of configuration."""
    file = conf / "best" / "parameters.yml"
    file.parent.mkdir(parents=True, exist_ok=True)
    figure = f"# {best['chosen_by']}: {best[best['chosen_by']]:.6g}\n\n"
    tree = set_by_path({}, best["settings"])
    if environment := best.get("environment"):
        tree["best"] = {"environment": environment}
    write_text(file, HEAD + figure + yaml.safe_dump(tree, sort_keys=False))
    return file


def best_lines(
    best: Mapping[str, Any], file: Path, conf_source: str | None = None
) -> Iterator[str]:
    """The winner, and what to type."""
    source = f" --conf-source={shlex.quote(conf_source)}" if conf_source else ""
    name, trials = best["chosen_by"], best["trials"]
    told = ", ".join(f"{count} {status}" for status, count in trials.items())
    yield f"Trial {best['trial_id']} won: {name} {best[name]:.6g} ({told})."
    yield from (f"  {path}: {value}" for path, value in best["settings"].items())
    yield f"Written to {file}. Train with it: kedro run --env=best{source}"
