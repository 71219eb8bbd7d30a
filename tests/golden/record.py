"""The golden record: what small trainings and commands did, and whether they still do.

    python -m tests.golden.record --write FILE      make a record
    python -m tests.golden.record --compare [FILE]  compare this checkout with one
    python -m tests.golden.record --weights FOLDER  store digests of weights
    python -m tests.golden.record --against OTHER   compare weights, bit for bit, with
                                                    those of the checkout in OTHER

Rows, statuses and words of messages must be equal, and metrics must agree to 1e-4.
Configurations can be selected by adding their names after the options.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

STORED = Path(__file__).with_name("record.json")
HERE = Path(__file__).parents[2]
RELATIVE, ABSOLUTE = 1e-4, 1e-6

Entries = dict[str, dict[str, Any]]


def made(names: list[str], folder: Path) -> Entries:
    """Run the configurations `names`, or all if it is empty. Return their results."""
    from tests.golden.commands import COMMANDS, ran
    from tests.golden.configurations import TRAININGS
    from tests.golden.trainings import trained

    commands = [name for name in COMMANDS if name in names or not names]
    trainings = [name for name in TRAININGS if name in names or not names]
    return ran(commands, folder / "commands") | trained(trainings, folder / "trainings")


def differences(stored: Any, found: Any, place: str = "") -> Iterator[str]:
    """Yield a line for each value of `found` that differs from `stored`."""
    if isinstance(stored, Mapping) and isinstance(found, Mapping):
        for key in [*stored, *(key for key in found if key not in stored)]:
            yield from differences(
                stored.get(key, "absent"), found.get(key, "absent"), f"{place}/{key}"
            )
    elif isinstance(stored, list) and isinstance(found, list):
        yield from differences(dict(enumerate(stored)), dict(enumerate(found)), place)
    elif not _same(stored, found):
        yield f"{place}: {stored!r} is recorded, {found!r} was found"


def _same(stored: Any, found: Any) -> bool:
    if isinstance(stored, float) and isinstance(found, (int, float)):
        both_nan = math.isnan(stored) and math.isnan(found)
        return both_nan or math.isclose(
            stored, found, rel_tol=RELATIVE, abs_tol=ABSOLUTE
        )
    return bool(stored == found)


def read(file: Path = STORED) -> Entries:
    found: Entries = json.loads(file.read_text())
    return found


def without_weights(entries: Entries) -> Entries:
    """Return `entries` without weights, which differ between processors."""
    return {
        name: {key: value for key, value in entry.items() if key != "weights"}
        for name, entry in entries.items()
    }


def write(entries: Entries, file: Path) -> None:
    """Write one configuration per line, so that a diff shows which of them changed."""
    lines = [f"{json.dumps(n)}: {json.dumps(e)}" for n, e in entries.items()]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def compare(stored: Entries, found: Entries) -> int:
    """Print the differences, and return the number of configurations that differ."""
    count = 0
    for name, entry in found.items():
        lines = list(differences(stored.get(name, {}), entry))
        count += bool(lines)
        for line in lines[:8]:
            _say(f"{name} {line}")
        if len(lines) > 8:
            _say(f"{name}: {len(lines) - 8} more values differ")
    _say(f"{count} of {len(found)} configurations differ from the record")
    return count


def weights_of(entries: Entries) -> dict[str, str]:
    return {
        name: entry["weights"] for name, entry in entries.items() if "weights" in entry
    }


def against(other: Path, own: dict[str, str], names: list[str]) -> int:
    """Also train with the source in `other`, and return how many weights differ."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.golden.record", "--weights", folder]
        source = {"PYTHONPATH": str(other / "src")}
        subprocess.run(
            [*command, *names], cwd=HERE, env=os.environ | source, check=True
        )
        theirs = json.loads((Path(folder) / "weights.json").read_text())
    differing = [n for n in own | theirs if own.get(n) != theirs.get(n)]
    for name in differing:
        _say(f"{name}: the weights differ")
    _say(f"{len(differing)} of {len(own | theirs)} configurations have other weights")
    return len(differing)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path)
    parser.add_argument("--compare", type=Path, nargs="?", const=STORED)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        entries = made(asked.names, Path(folder))
    differing = 0
    if asked.write:
        write(without_weights(entries), asked.write)
    if asked.compare:
        differing += compare(read(asked.compare), without_weights(entries))
    if asked.weights:
        asked.weights.mkdir(parents=True, exist_ok=True)
        text = json.dumps(weights_of(entries), indent=1)
        (asked.weights / "weights.json").write_text(text)
    if asked.against:
        differing += against(asked.against, weights_of(entries), asked.names)
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
