"""Adding a parameter means adding one field, which contains the parameter's roles."""

import pytest

from flatout.engine.parameters import Settings, in_role, is_in, reported
from flatout.engine.parameters.common import (
    EXECUTION,
    MACHINE,
    UNTIMED,
    SettingsModel,
    by_path,
    parameter,
)
from flatout.engine.train.setup.identity import equal_on_all_ranks, identity
from tests.engine.runs import make_job


class Group(SettingsModel):
    """A group inside another one, like the loader's."""

    plain: int = 1
    quick: int = parameter(1, EXECUTION, MACHINE)
    beside: int = parameter(2, UNTIMED, ge=2)


class Own(SettingsModel):
    """Settings with fields that flatout does not have."""

    outer: Group = Group()
    whole: Group = parameter(Group(), EXECUTION)
    size: int = parameter(3, reported="rows")


def test_names_follow_from_the_fields():
    assert in_role(EXECUTION, Own) == ("outer.quick", "whole")
    assert in_role(MACHINE, Own) == ("outer.quick", "whole.quick")
    assert in_role(UNTIMED, Own) == ("outer.beside", "whole.beside")
    assert reported(Own) == {"rows": "size"}
    with pytest.raises(ValueError, match="greater than or equal to 2"):
        Group(beside=1)


def test_every_parameter_decides_or_has_a_role():
    paths = [path for path, _ in by_path(Settings().model_dump(mode="json"))]
    known = {p for p in paths if is_in(p, in_role(EXECUTION))}
    assert {"train.compile", "train.loader.num_workers", "paths.metrics"} <= known
    assert {"train.learning_rate", "model.task", "runtime.seed"} <= {*paths} - known
    assert {"train.optimizer", "train.compute_metrics"} <= {*paths} - known


def test_identity_and_agreement_ask_for_the_roles(tmp_path):
    job = make_job(tmp_path, callbacks=["a.b"], compile=False)
    assert "train.compile" not in equal_on_all_ranks(job)
    assert "train.batching" in equal_on_all_ranks(
        job
    ) and "train.batching" not in identity(job)
    assert "train.learning_rate" in identity(job)
    assert "train.callbacks" not in identity(job)
