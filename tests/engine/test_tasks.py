"""Dotted paths of tasks that are not tasks or are incomplete."""

import pytest

from flatout.engine.families import Family
from flatout.engine.parameters import SettingsError
from flatout.engine.tasks import HeadKind, Task, task_class
from flatout.engine.tasks.sequence_classification import SequenceClassification


class HalfATask(Task):
    """Has a head but no loss."""

    head_kind = HeadKind.ROW


class OldNames(HalfATask):
    """A task as written for version 0.1."""

    head = HeadKind.TOKEN


class OldTexts(HalfATask):
    """Texts as written for version 0.1."""

    joins_texts = True


class OldJudge(SequenceClassification):
    """A task whose judge expects a function that it is not given."""

    def judge(self, logits, labels, decode):
        """Do nothing."""


class TextsMethod(SequenceClassification):
    """Defines a method instead of a value."""

    def texts(self):
        """Nothing."""


class OtherNames(SequenceClassification):
    """A task whose methods have the right number of arguments with other names."""

    def judge(self, scores, wanted, *, shown=3):
        """Do nothing."""

    @staticmethod
    def chance_loss(num_outputs):
        """Do nothing."""


BAD = {
    "classification": "one of image-classification, multi-label-classification, sequ",
    "regresion": "did you mean regression",
    "tests.engine.nowhere.MyTask": "cannot be imported",
    "tests.engine.test_tasks.NoSuchTask": "cannot be imported",
    "tests.engine.test_tasks.BAD": "does not derive from Task",
    "tests.engine.test_tasks.OldNames": "OldNames.head is head_kind now",
    "tests.engine.test_tasks.OldTexts": r"joins_texts is texts = Texts\(joined=",
    "tests.engine.test_tasks.HalfATask": "has no loss; add it to the class",
    "tests.engine.test_tasks.OldJudge": r"OldJudge\.judge cannot be called with "
    r"\(logits, labels\): missing a required argument: 'decode'",
    "tests.engine.test_tasks.TextsMethod": r"TextsMethod\.texts is a method: set it to "
    "a value, as Task does",
}


@pytest.mark.parametrize("path", BAD)
def test_what_is_no_task_is_refused_with_what_it_lacks(path):
    with pytest.raises(SettingsError, match=f"^model.task: .*{BAD[path]}"):
        task_class(path)


def test_a_method_may_have_other_names_for_its_arguments():
    assert task_class("tests.engine.test_tasks.OtherNames") is OtherNames


@pytest.mark.parametrize(("base", "most"), [(Task, 34), (Family, 24)])
def test_a_task_and_a_family_have_few_members(base, most):
    members = [n for n in vars(base) if not n.startswith("_")]
    assert len(members) <= most
