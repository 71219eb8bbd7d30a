"""Tasks named by a dotted path that are none, or half of one."""

import pytest

from flatout.engine.parameters import SettingsError
from flatout.engine.tasks import HeadKind, Task, task_class


class HalfATask(Task):
    """Knows its head, and no loss."""

    head_kind = HeadKind.ROW


class OldNames(HalfATask):
    """As tasks were written for version 0.1."""

    head = HeadKind.TOKEN


class OldTexts(HalfATask):
    """Likewise."""

    joins_texts = True


BAD = {
    "tests.engine.nowhere.MyTask": "cannot be imported",
    "tests.engine.test_tasks.NoSuchTask": "cannot be imported",
    "tests.engine.test_tasks.BAD": "does not derive from Task",
    "tests.engine.test_tasks.OldNames": "OldNames.head is head_kind now",
    "tests.engine.test_tasks.OldTexts": r"joins_texts is texts = Texts\(joined=",
    "tests.engine.test_tasks.HalfATask": "has no loss; add it to the class",
}


@pytest.mark.parametrize("path", BAD)
def test_what_is_no_task_is_refused_with_what_it_lacks(path):
    with pytest.raises(SettingsError, match=f"^model.task: .*{BAD[path]}"):
        task_class(path)


def test_a_task_has_few_members():
    members = [n for n in vars(Task) if not n.startswith("_")]
    assert len(members) <= 34
