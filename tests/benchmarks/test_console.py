"""The line of a trial as a terminal and a log file show it."""

import pytest

from flatout.reports.console import show_trial
from tests.engine.benches import trial

PHASES = {"io_ms": 2.06, "forward_ms": 38.0, "backward_ms": 49.0, "optimizer_ms": 4}
WHOLE = {"total_ms": 93.1, "gpu_util_pct": 88.0, "reserved_memory_gib": 0.65}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            trial("001", samples_per_s=10.0),
            "[1] ok      end_to_end, batch 8, auto/auto, auto workers  10.0 samples/s",
        ),
        (trial("003", samples_per_s=None, status="oom", note="full"), "[3] oom"),
        (
            trial("001", samples_per_s=171.9, **PHASES, **WHOLE),
            "  171.9 samples/s; I/O 2.1 ms, forward 38.0 ms, backward 49.0 ms, "
            "optimizer 4.0 ms, total 93.1 ms, GPU 88.0 %, memory 0.7 GiB  ",
        ),
        # nothing is shown twice
        (
            trial("001", samples_per_s=9.0, label="flatout, batch 8", num_workers=2),
            "[1] ok      flatout, batch 8, auto/auto, 2 workers  ",
        ),
        (
            trial("002", samples_per_s=9.0, label="2 workers", num_workers=2),
            "[2] ok      2 workers, batch 8, auto/auto  ",
        ),
    ],
)
def test_a_trial_is_a_line(capsys, found, said):
    show_trial(found)
    [line] = capsys.readouterr().err.splitlines()
    assert said in line and line.endswith(found.note)
