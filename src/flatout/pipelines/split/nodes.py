"""Nodes of the split pipeline. They return recipes: objects that compute a result while
it is saved, unless the stored result is up to date."""

from __future__ import annotations

from typing import Any

from flatout.engine.data.raw_texts import open_raw_texts
from flatout.engine.data.split_recipes import plan_split
from flatout.engine.parameters import SplitSettings
from flatout.engine.tasks import columns_of


def split_rows(raw_texts: Any, split: SplitSettings, task: str) -> dict[str, Any]:
    """Check the rows of `raw_texts`, and assign each to one of the three splits."""
    columns = columns_of(split, task)
    return plan_split(open_raw_texts(raw_texts), columns, split)
