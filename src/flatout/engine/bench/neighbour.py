"""What stands below a rung: `python -m flatout.engine.bench.neighbour FOLDER`.

Trains as FOLDER/spec.json says until it is warm, says so by a line of JSON, and takes
a window for each line that it reads, until there are no more.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from flatout.engine.bench.measure import loaded_feed, warm_training
from flatout.engine.bench.trial import die_with_parent
from flatout.engine.bench.trial_spec import TrialSpec
from flatout.engine.bench.windows import rate
from flatout.engine.garbage import collect_rarely
from flatout.engine.jobs.job_files import JobFiles
from flatout.engine.runtime import set_up


def main() -> int:
    answers = _own_output()
    die_with_parent()
    collect_rarely()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    folder = Path(sys.argv[1])
    stored = json.loads((folder / "spec.json").read_text())
    spec = TrialSpec.from_json(stored["spec"])
    job = JobFiles(**stored["job"]).open(spec.settings, folder)
    runtime = set_up(spec.settings.runtime)
    warm = warm_training(job, spec.measure, loaded_feed, runtime, None)
    _tell(answers, {"warm": True})
    for _ in sys.stdin:
        window = warm.window_after_rest()
        _tell(answers, {"samples_per_s": rate(window), "clean": window.clean})
    return 0


def _own_output() -> TextIO:
    """For answers alone: what anything else prints goes to the log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _tell(answers: TextIO, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    raise SystemExit(main())
