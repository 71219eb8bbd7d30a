"""Small training runs and commands have the same results as in record.json."""

import pytest

from tests.golden.commands import COMMANDS, ran
from tests.golden.configurations import TRAININGS
from tests.golden.record import differences, read, without_weights
from tests.golden.trainings import trained

ALONE = [name for name, asked in TRAININGS.items() if "ranks" not in asked]
TOGETHER = [name for name in TRAININGS if name not in ALONE]


@pytest.fixture(scope="module")
def stored():
    return read()


@pytest.mark.parametrize("name", ALONE)
def test_a_training_does_what_it_did(tmp_path, stored, name):
    found = without_weights(trained([name], tmp_path))
    assert not list(differences(stored[name], found[name]))


@pytest.mark.process
def test_two_ranks_do_what_they_did(tmp_path, stored):
    found = without_weights(trained(TOGETHER, tmp_path))
    assert not list(differences({n: stored[n] for n in TOGETHER}, found))


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_does_what_it_did(tmp_path, empty_store, stored, name):
    found = ran([name], tmp_path, empty_store)[name]
    assert not list(differences(stored[name], found))


def test_nothing_is_recorded_that_is_not_run(stored):
    assert {*TRAININGS, *COMMANDS} == set(stored)


@pytest.mark.parametrize(
    ("stored", "found", "count"),
    [
        ({"a": [1.0, 2]}, {"a": [1.00005, 2]}, 0),
        ({"a": [1.0, 2]}, {"a": [1.0002, 2]}, 1),
        ({"a": [1.0, 2]}, {"a": [1.0, 3], "b": 1}, 2),
        ({"a": [1, 2]}, {"a": [1]}, 1),
        ({"a": "x"}, {}, 1),
    ],
)
def test_what_counts_as_a_difference(stored, found, count):
    assert len(list(differences(stored, found))) == count
