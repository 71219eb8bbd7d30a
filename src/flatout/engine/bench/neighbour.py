"""What stands below a rung: `python -m flatout.engine.bench.neighbour FOLDER PARENT`.

Trains as FOLDER/spec.json says until it is warm, and answers each line of JSON that it
reads by one, until there are no more: `{"ask": "window"}` by a window's rate. PARENT is
the process id of the trial that it stands beside, with which it ends.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.engine.bench.trial import die_with_parent
from flatout.engine.garbage import collect_rarely

if TYPE_CHECKING:
    from flatout.engine.bench.windows import Warm


def main() -> int:
    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what anything else prints goes to the log
        collect_rarely()
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
        warm = _warm(folder)
        for line in sys.stdin:
            answers.write(json.dumps(_answer(warm, json.loads(line))) + "\n")
            answers.flush()
    return 0


def _warm(folder: Path) -> Warm:
    from flatout.engine.bench.measure import loaded_feed, warm_training
    from flatout.engine.bench.trial_spec import TrialSpec
    from flatout.engine.jobs.job_files import JobFiles
    from flatout.engine.runtime import set_up

    stored = json.loads((folder / "spec.json").read_text())
    spec = TrialSpec.from_json(stored["spec"])
    job = JobFiles(**stored["job"]).open(spec.settings, folder)
    runtime = set_up(spec.settings.runtime)
    return warm_training(job, spec.measure, loaded_feed, runtime, None)


def _answer(warm: Warm, asked: Mapping[str, Any]) -> dict[str, Any]:
    from flatout.engine.bench.windows import rate

    if asked["ask"] == "time":
        return {"step_s": warm.time_step()}
    if asked["ask"] == "shorten":
        warm.shorten(asked["steps"])
    if asked["ask"] == "window":
        warm.lead_in()
        window = warm.window()
        return {"samples_per_s": rate(window), "clean": window.clean}
    return {}


if __name__ == "__main__":
    raise SystemExit(main())
