"""The bottleneck of a step: each verdict, with the metrics that lead to it."""

import pytest

from flatout.engine.benchmark.trials.trial_spec import TrialResult
from flatout.engine.benchmark.verdict import judge
from tests.engine import benches


def trial(**figures) -> TrialResult:
    healthy = {
        "status": "ok",
        "total_ms": 100.0,
        "io_ms": 1.0,
        "samples_per_s": 320.0,
        "padding_pct": 0.0,
        "precision": "bf16",
    }
    return benches.trial(**{**healthy, **figures})


@pytest.mark.parametrize(
    ("figures", "bound", "because"),
    [
        ({}, "compute", "waits 1 % for batches"),
        (
            {"io_ms": 25.0, "num_workers": 2},
            "loader",
            "a step of 100.0 ms waits 25.0 ms for its batch (25 %) with 2 workers",
        ),
        (
            {"host_ms": 97.0},
            "launch",
            "the host needs 97.0 ms to launch a step of 100.0 ms",
        ),
        ({"gpu_util_pct": 60.0}, "launch", "the GPU is busy 60 % of the time"),
        ({"reserved_memory_gib": 75.0}, "memory", "94 % of 80 GiB are used"),
        ({"status": "oom", "note": "full"}, "memory", "full"),
        ({"status": "error", "total_ms": None, "note": "no"}, "unknown", "no"),
        (
            {
                "padding_pct": 40.0,
                "mfu_pct": 20.0,
                "gpu_util_pct": 99.0,
            },
            "compute",
            "waits 1 % for batches, 20 % of the data sheet's peak, "
            "GPU busy 99 %, 40 % of the tokens are padding",
        ),
    ],
)
def test_verdicts(figures, bound, because):
    found = judge(trial(**figures), memory_gib=80.0)
    assert (found.bound, found.because) == (bound, because)
    assert found.advice


@pytest.mark.parametrize(
    ("figures", "advice"),
    [
        ({"status": "timeout", "log": "l"}, "a larger benchmark.trial_timeout_s"),
        ({"status": "error", "log": "l"}, "see its log"),
        ({"status": "error"}, "other settings: these were refused"),
    ],
)
def test_what_to_do_after_a_fault(figures, advice):
    found = judge(trial(total_ms=None, **figures), memory_gib=80.0)
    assert (found.bound, found.advice) == ("unknown", advice)


def test_exchanging_gradients_bounds_below_90_percent_of_linear():
    single = trial(samples_per_s=100.0)
    four = trial(samples_per_s=280.0, world_size=4)
    found = judge(four, single=single)
    assert found.bound == "communication"
    assert found.because == "4 devices give 2.80 times the rate of one, 70 % of linear"
    assert judge(trial(samples_per_s=390.0, world_size=4), single=single).bound == (
        "compute"
    )


def test_advice_names_the_next_thing_to_change():
    assert "num_workers" in judge(trial(io_ms=50.0)).advice
    assert "packed" in judge(trial(padding_pct=30.0)).advice
    assert "cuda_graphs" in judge(trial(host_ms=99.0)).advice
    graphs = judge(trial(host_ms=99.0, cuda_graphs=True))
    assert "global_batch_size" in graphs.advice


def test_what_lost_in_the_same_sweep_is_not_advised():
    padded = trial(strategy="grouped", padding_pct=40.0)
    assert judge(padded).advice.startswith("train.batching: packed")
    packed = trial(strategy="packed", samples_per_s=1.0)
    assert "packed" not in judge(padded, tried=[packed]).advice
    waits = trial(io_ms=50.0, num_workers=0)
    assert judge(waits).advice.startswith("more train.loader.num_workers")
    fed = trial(num_workers=2, samples_per_s=1.0)
    assert judge(waits, tried=[fed]).advice == (
        "benchmark.profile: true, to see why; more workers were slower here"
    )
