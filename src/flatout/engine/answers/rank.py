"""Entry point of one rank of the distributed comparison that `verify` makes.

Run it as `python -m flatout.engine.answers.rank FOLDER`. FOLDER/spec.json describes the
training job in the same format as for `flatout.engine.launch.rank`. The main rank
writes the verdict to FOLDER/verdict.json.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.engine.launch.rank import main

if TYPE_CHECKING:
    from flatout.engine.machine.runtime import Runtime
    from flatout.engine.train.process_group import ProcessGroup
    from flatout.engine.train.setup.job import TrainJob


def _verify(job: TrainJob, runtime: Runtime, group: ProcessGroup, folder: Path) -> None:
    from flatout.engine.answers.step_check import VERDICT, verify

    if verdict := verify(job, runtime, group):
        (folder / VERDICT).write_text(json.dumps(asdict(verdict)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), work=_verify)
