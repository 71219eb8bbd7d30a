"""All model types that transformers has for a task give equal results or are
refused."""

import pytest

from tests.engine.every_type import MAPPINGS, sweep, tried


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("task", list(MAPPINGS))
def test_every_type_answers_as_a_row_at_a_time_or_is_refused(task):
    found = sweep(task)
    good = ("equal", "refused", "not small")
    wrong = {kind: told for kind, told in found.items() if not told.startswith(good)}
    assert wrong == {}
    assert sum(told.startswith("equal") for told in found.values()) > len(found) / 2


def test_logits_beyond_the_rows_move_no_targets():
    """Perceiver returns logits for all its positions."""
    assert tried("perceiver", "masked-lm") == "equal"
