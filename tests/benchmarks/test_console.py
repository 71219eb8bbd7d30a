"""The table of trials as a terminal and a log file see it."""

from __future__ import annotations

import io

from rich.console import Console

from flatout.reports.console import TrialTable
from tests.engine import benches


def trial(number: str, rate: float | None, status: str = "ok", **figures):
    return benches.trial(number, samples_per_s=rate, status=status, **figures)


TRIALS = [
    trial("001", 10.0),
    trial("002", 50.0, total_ms=1234.5),
    trial("003", None, "oom", note="full"),
    trial("004", 99.0, kind="compute"),
]


def shown(console: Console) -> list[str]:
    table = TrialTable(console)
    for one in TRIALS:
        table.add(one)
    table.end()
    return console.file.getvalue().splitlines()


def test_in_a_log_file_a_line_a_trial_and_the_table_at_the_end():
    lines = shown(Console(file=io.StringIO()))
    assert lines[0].startswith("[1] ok      end_to_end, batch 8, auto/auto")
    assert "10.0 samples/s" in lines[0]
    assert lines[2].startswith("[3] oom")
    assert "full" in lines[2]
    [row] = [line for line in lines if line.split()[:1] == ["002"]]
    assert "1,234" in row


def test_a_growing_line_has_guide_es_columns():
    console = Console(file=io.StringIO())
    phases = {"io_ms": 2.06, "forward_ms": 38.0, "backward_ms": 49.0, "optimizer_ms": 4}
    whole = {"total_ms": 93.1, "gpu_util_pct": 88.0, "reserved_memory_gib": 0.65}
    TrialTable(console).add(trial("001", 171.9, **phases, **whole))
    line = console.file.getvalue().splitlines()[0]
    assert (
        "  171.9 samples/s; I/O 2.1 ms, forward 38.0 ms, backward 49.0 ms, "
        "optimizer 4.0 ms, total 93.1 ms, GPU 88.0 %, memory 0.7 GiB  " in line
    )


def test_a_line_says_nothing_twice():
    console = Console(file=io.StringIO())
    table = TrialTable(console)
    table.add(trial("001", 9.0, label="flatout, batch 8", num_workers=2))
    table.add(trial("002", 9.0, label="2 workers", num_workers=2))
    lines = console.file.getvalue().splitlines()
    assert lines[0].startswith("[1] ok      flatout, batch 8, auto/auto, 2 workers  ")
    assert lines[1].startswith("[2] ok      2 workers, batch 8, auto/auto  ")
