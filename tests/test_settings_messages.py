"""What a user reads when parameters cannot be used."""

from __future__ import annotations

import pytest

from flatout.engine.settings import Settings, SettingsError, parse_settings


def faults(parameters: dict) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        parse_settings(parameters)
    head, *lines = str(caught.value).split("\n")
    assert head == (
        f"{len(lines)} parameter{'s' if len(lines) > 1 else ''} cannot be used; "
        "nothing was run. Mend them in conf/ or on the command line (--params):"
    )
    return [line.removeprefix("  ") for line in lines]


def test_all_faults_come_in_one_message():
    assert faults(
        {
            "runtime": {"tf32": "perhaps", "threads": 0},
            "split": {"fractions": {"train": 0.8, "validation": 0.3, "test": 0.1}},
            "tokenize": {"max_length": 0},
            "train": {"global_batchsize": 8, "loader": {"num_worker": 2}},
        }
    ) == [
        "runtime.tf32: should be a boolean, unable to interpret input (got 'perhaps')",
        "runtime.threads: should be greater than or equal to 1 or should be 'auto' "
        "(got 0)",
        "split.fractions: train + validation + test must be 1, not 1.2",
        "tokenize.max_length: should be greater than or equal to 2 (got 0)",
        "train.loader.num_worker: unknown parameter; did you mean "
        "train.loader.num_workers?",
        "train.global_batchsize: unknown parameter; did you mean "
        "train.global_batch_size?",
    ]


@pytest.mark.parametrize(
    ("parameters", "fault"),
    [
        (
            {"train": {"global_batch_size": 0}},
            "train.global_batch_size: should be greater than or equal to 1 (got 0)",
        ),
        (
            {"train": {"strategy": "sorted"}},
            "train.strategy: should be 'fixed', 'random', 'grouped' or 'packed' or "
            "should be 'auto' (got 'sorted')",
        ),
        (
            {"train": {"distributed": {"bucket_mib": "al"}}},
            "train.distributed.bucket_mib: should be an integer, unable to parse "
            "string as an integer or should be 'all' (got 'al')",
        ),
        (
            {"benchmark": {"tune_minutes": "soon"}},
            "benchmark.tune_minutes: should be a number, unable to parse string as a "
            "number or should be 'auto' (got 'soon')",
        ),
        (
            {"trian": {}},
            "trian: unknown parameter; did you mean train?",
        ),
        (
            {"learning_rate": 3},
            "learning_rate: unknown parameter; did you mean train.learning_rate?",
        ),
        (
            {"train": {"seed": 3}},
            "train.seed: unknown parameter; did you mean runtime.seed or split.seed?",
        ),
        (
            {"train": {"global_batch_size": True}},
            "train.global_batch_size: should be a number, not true or false (got True)",
        ),
        (
            {"train": {"epochs": True}},
            "train.epochs: should be a number, not true or false (got True)",
        ),
        (
            {"train": {"max_steps": False}},
            "train.max_steps: should be a number, not true or false (got False)",
        ),
        (
            {"benchmark": {"num_workers": [0, False]}},
            "benchmark.num_workers: should be a number, not true or false "
            "(got [0, False])",
        ),
        (
            {"model": {"config": {}}},
            "model: give name_or_path (a checkpoint) or config.model_type (from "
            "scratch)",
        ),
        (
            {"model": {"name_or_path": "org/model", "trust_remote_code": True}},
            "model: trust_remote_code runs code from the model's repository: pin it "
            "with revision (a commit hash)",
        ),
        (
            {"train": {"distributed": {"num_machines": 2}}},
            "train.distributed: num_machines over 1 needs rendezvous_endpoint: "
            "host:port",
        ),
    ],
)
def test_a_fault_names_its_path_and_what_to_do(parameters, fault):
    assert faults(parameters) == [fault]


def test_true_and_false_are_taken_where_they_are_meant():
    train = {"compile": True, "cuda_graphs": "auto", "fused_optimizer": False}
    assert parse_settings({"train": train}).train.compile is True
    grid = {"train.compile": [True, False]}
    assert parse_settings({"sweep": {"grid": grid}}).sweep.grid == grid


def test_nothing_given_is_valid():
    assert parse_settings({}) == Settings()
