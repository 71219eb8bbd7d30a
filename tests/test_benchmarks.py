"""The scripts in benchmarks/: the harness, and the cheapest script small."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from functools import partial
from types import SimpleNamespace

import pytest

from benchmarks import (
    checkouts,
    commands,
    encoders,
    harness,
    images,
    language_models,
    lstms,
)
from tests.forks import Forked

SCRIPTS = (checkouts, commands, encoders, images, language_models, lstms)


def test_sides_change_places_and_ratios_are_of_turns(monkeypatch, tmp_path):
    rates = {"flatout": [100.0, 50.0], "loop": [50.0, 25.0], "broken": []}
    asked = []

    def run(module, case, name, checkout, out):
        asked.append(name)
        if name == "broken":
            return {"error": "status 1: no | memory"}
        return {"samples_per_s": rates[name].pop(0), "first_step_s": 2.0}

    monkeypatch.setattr(harness, "_run", run)
    sides = dict.fromkeys(rates, lambda given: {})
    script = harness.Script("benchmarks.some", "", {"one": sides})
    given = Namespace(turns=2, without=[], out=tmp_path)
    found = harness._by_turns(script, "one", given)
    assert asked == ["flatout", "loop", "broken", "loop", "flatout"]
    lines = harness._table("one", found, "samples_per_s").splitlines()
    assert lines[4] == "| flatout | 75 | 50 to 100 | 2 |  | first_step_s 2 |"
    assert lines[5].split(" | ")[4] == "2.00 (2.00 to 2.00)"
    assert lines[6].startswith("| broken | status 1: no / memory |")


@pytest.mark.parametrize("module", SCRIPTS, ids=lambda module: module.__name__)
def test_each_script_names_its_cases_and_sides(module):
    script = module.SCRIPT
    assert script.module == module.__name__
    assert set(script.small_cases) <= set(script.cases)
    assert all(len(sides) > 1 for sides in script.cases.values())
    for sides in script.cases.values():
        assert all(
            callable(side) or isinstance(side, partial) for side in sides.values()
        )


def forked(command, check, **given):
    """A side in a fork, which imports nothing anew."""
    if "--side" not in command:
        return subprocess.run(command, check=check, **given)
    return subprocess.CompletedProcess(command, Forked(command, **given).wait())


@pytest.mark.process
@pytest.mark.slow
def test_a_script_runs_small(tmp_path, monkeypatch):
    others = [name for name in encoders.SIDES if "Trainer, b" in name]
    asked = ["--small", "--turns=1", f"--out={tmp_path}", "--without", *others]
    monkeypatch.setattr(sys, "argv", ["encoders", *asked])
    forking = SimpleNamespace(**{**vars(subprocess), "run": forked})
    monkeypatch.setattr(harness, "subprocess", forking)
    assert harness.main(encoders.SCRIPT) == 0
    kept = json.loads((tmp_path / "encoders.json").read_text())
    runs = kept["runs"]["batch 16"]
    assert list(runs) == ["flatout", "packed, compiled loop", "Trainer, random order"]
    assert all(own[0]["samples_per_s"] > 0 for own in runs.values())
    assert "| flatout |" in (tmp_path / "encoders.md").read_text()
