"""The scripts in benchmarks/: the harness, and the cheapest script small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from functools import partial

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
from tests.conftest import PROJECT

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


@pytest.mark.process
@pytest.mark.slow
def test_a_script_runs_small(tmp_path):
    others = [name for name in encoders.SIDES if "Trainer, b" in name]
    command = [sys.executable, "-m", "benchmarks.encoders", "--small", "--turns=1"]
    done = subprocess.run(
        [*command, f"--out={tmp_path}", "--without", *others],
        cwd=PROJECT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / "encoders.json").read_text())
    runs = kept["runs"]["batch 16"]
    assert list(runs) == ["flatout", "packed, compiled loop", "Trainer, random order"]
    assert all(own[0]["samples_per_s"] > 0 for own in runs.values())
    assert "| flatout |" in (tmp_path / "encoders.md").read_text()
