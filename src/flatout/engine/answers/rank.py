"""A comparison of steps by one rank: `python -m flatout.engine.answers.rank FOLDER`.

FOLDER/spec.json describes the training, as for `flatout.engine.launch.rank`. The main
rank writes the verdict to FOLDER/verdict.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.engine.launch.rank import check_world_size, main, open_job
from flatout.engine.machine.environment import launched_from_outside
from flatout.engine.parameters import Settings, SettingsError

if TYPE_CHECKING:
    from flatout.engine.answers.verdict import Verdict
    from flatout.engine.train.setup.job import TrainJob

RANK = "flatout.engine.answers.rank"
VERDICT = "verdict.json"


def verify_job(job: TrainJob) -> Verdict:
    """Compare the first step of `job`, in this process or in one per device. Raises
    SettingsError for several machines, and the errors of a training at its start."""
    from flatout.engine.answers.step_check import verify
    from flatout.engine.answers.verdict import Verdict
    from flatout.engine.launch.launch import resolve_processes, write_spec
    from flatout.engine.launch.supervisor import Attempt
    from flatout.engine.machine.runtime import set_up

    distributed = job.settings.train.distributed
    if launched_from_outside() or distributed.num_machines > 1:
        raise SettingsError(
            "verify runs on one machine and starts its ranks: give it "
            "train.distributed.num_machines=1, without torchrun, accelerate or srun"
        )
    processes = resolve_processes(distributed)
    if processes == 1:
        verdict = verify(job, set_up(job.settings.runtime))
        assert verdict is not None  # noqa: S101 - the only rank is the main one
        return verdict
    with tempfile.TemporaryDirectory(prefix="flatout-") as name:
        folder = Path(name)
        write_spec(job, processes, folder)
        error = Attempt(job, processes, folder, RANK).run()
        if error is not None:
            raise error
        return Verdict.from_json(json.loads((folder / VERDICT).read_text("utf-8")))


def _verify(spec: dict[str, Any], settings: Settings, folder: Path) -> None:
    from flatout.engine.answers.step_check import verify
    from flatout.engine.machine.runtime import set_up
    from flatout.engine.train.process_group import ProcessGroup

    runtime = set_up(settings.runtime)
    check_world_size(runtime.ranks.world_size, spec["world_size"])
    group = ProcessGroup.join(settings.train.distributed, runtime)
    verdict = verify(open_job(spec, settings), runtime, group)
    if verdict is not None:
        (folder / VERDICT).write_text(json.dumps(asdict(verdict)), encoding="utf-8")
    group.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), work=_verify)
