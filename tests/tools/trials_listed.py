"""How long the trials of a long sweep take to be listed:
`python -m tests.tools.trials_listed journal|postgresql|mysql [TRIALS]`.

Trials are written as a sweep without a pruner writes them: queued, taken, three
heartbeats, an answer. The listing is timed in a process of its own, in CPU seconds; of
a database by turns with Optuna's own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial, TrialState, create_trial

from flatout.engine.parameters import SweepSettings
from flatout.engine.sweep.queue import ANSWER, BEAT_S, MACHINE, this_machine
from flatout.engine.sweep.space import combinations, distributions
from flatout.engine.sweep.storage import open_storage
from tests.tools.queue_drill import server

FIGURES = ("validation_loss", "validation_accuracy", "samples_per_s", "elapsed_s")
LISTING = """
import sys, time
import optuna, sqlalchemy
from flatout.engine.machine.garbage import collect_rarely
from flatout.engine.sweep.storage import open_storage
collect_rarely()  # as every command of Kedro does
begin = time.process_time()
if sys.argv[2] == "flatout":
    storage = open_storage(sys.argv[1])
else:
    storage = optuna.storages.get_storage(optuna.storages.RDBStorage(sys.argv[1]))
study = optuna.load_study(study_name="listed", storage=storage)
found = study.get_trials(deepcopy=False)
print(f"{sys.argv[2]}: {len(found)} trials in {time.process_time() - begin:.2f} s")
"""


def write(place: str, trials: int) -> Sequence[FrozenTrial]:
    os.fsync = lambda _: None  # of writing, which is not what is timed
    values = [n / 1e5 for n in range(1, 101)]
    sizes = list(range(1, trials // 100 + 1))
    grid = {"train.learning_rate": values, "train.global_batch_size": sizes}
    options = SweepSettings(storage=place, grid=grid)
    storage = open_storage(place)
    study = optuna.create_study(study_name="listed", storage=storage)
    answer = {
        **dict.fromkeys(FIGURES, 1.0),
        "status": "ok",
        "note": "",
        "key": "0" * 16,
    }
    for changes in combinations(options):
        waiting = create_trial(
            state=TrialState.WAITING,
            params=dict(changes),
            distributions=distributions(options),
        )
        trial = storage.create_new_trial(study._study_id, waiting)
        storage.set_trial_state_values(trial, TrialState.RUNNING)
        for _ in range(4):
            beating = {**this_machine(), BEAT_S: time.time()}
            storage.set_trial_user_attr(trial, MACHINE, beating)
        storage.set_trial_user_attr(trial, ANSWER, answer)
        storage.set_trial_state_values(trial, TrialState.COMPLETE, [1.0])
    return study.get_trials(deepcopy=False)


def copy(trials: Sequence[FrozenTrial], place: str) -> None:
    """Into a database, for which one write a statement takes too long."""
    study = optuna.create_study(study_name="listed", storage=open_storage(place))
    study.add_trials(trials)


def main(kind: str, trials: int = 10_000) -> None:
    folder = Path(tempfile.mkdtemp())
    journal = str(folder / "listed.journal")
    written = write(journal, trials)
    with server(kind, folder) as database:
        place = journal if kind == "journal" else database
        if kind != "journal":
            copy(written, place)
        listings = ["flatout"] if kind == "journal" else ["flatout", "optuna"]
        for listing in 3 * listings:
            command = [sys.executable, "-c", LISTING, place, listing]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
