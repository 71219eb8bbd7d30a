"""Tasks named by a dotted path that are none, or half of one."""

import pytest

from flatout.engine.parameters import SettingsError
from flatout.engine.tasks import HeadKind, Task, task_class
from flatout.engine.tasks.sequence_classification import SequenceClassification


class HalfATask(Task):
    """Knows its head, and no loss."""

    head_kind = HeadKind.ROW


class OldNames(HalfATask):
    """As tasks were written for version 0.1."""

    head = HeadKind.TOKEN


class OldTexts(HalfATask):
    """Likewise."""

    joins_texts = True


class OldJudge(SequenceClassification):
    """Wants a function that judge gets no more."""

    def judge(self, logits, labels, decode):
        """Nothing."""


class OtherNames(SequenceClassification):
    """Can be called as Task is."""

    def judge(self, scores, wanted, *, shown=3):
        """Nothing."""

    @staticmethod
    def chance_loss(num_outputs):
        """Nothing."""


BAD = {
    "tests.engine.nowhere.MyTask": "cannot be imported",
    "tests.engine.test_tasks.NoSuchTask": "cannot be imported",
    "tests.engine.test_tasks.BAD": "does not derive from Task",
    "tests.engine.test_tasks.OldNames": "OldNames.head is head_kind now",
    "tests.engine.test_tasks.OldTexts": r"joins_texts is texts = Texts\(joined=",
    "tests.engine.test_tasks.HalfATask": "has no loss; add it to the class",
    "tests.engine.test_tasks.OldJudge": r"OldJudge\.judge\(logits, labels\) cannot be "
    "called: missing a required argument: 'decode'",
}


@pytest.mark.parametrize("path", BAD)
def test_what_is_no_task_is_refused_with_what_it_lacks(path):
    with pytest.raises(SettingsError, match=f"^model.task: .*{BAD[path]}"):
        task_class(path)


def test_a_method_may_have_other_names_for_its_arguments():
    assert task_class("tests.engine.test_tasks.OtherNames") is OtherNames


def test_a_task_has_few_members():
    members = [n for n in vars(Task) if not n.startswith("_")]
    assert len(members) <= 34
