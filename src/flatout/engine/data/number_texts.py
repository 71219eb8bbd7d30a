"""A text column that holds only numbers: another column was most likely meant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from flatout.engine.data.column_checks import is_text
from flatout.engine.data.raw_texts import RawTexts, batches_of
from flatout.engine.data.rows import Columns, excerpt

NUMBER = r"^\s*[-+]?\p{Nd}+([.,:/-]\p{Nd}+)*\s*%?\s*$"
"""Also dates and times."""
PROSE = r"(?s)\p{L}.*\s.*\p{L}|\p{Lo}{4}"
"""Several words, or letters of a script that may have no spaces between them."""
SAMPLED_ROWS = 1000


@dataclass(frozen=True)
class TextColumn:
    name: str
    example: str


def all_numbers(texts: Any) -> bool:
    """Whether there are `texts`, and each is a number."""
    numbers = pc.match_substring_regex(texts, NUMBER)
    return len(texts) > 0 and bool(pc.all(numbers).as_py())


def prose_beside(raw: RawTexts, columns: Columns) -> TextColumn | None:
    """The column without a use whose first values are longest and mostly prose."""
    names = [n for n in raw.column_names if raw.column_names.count(n) == 1]
    unused = [name for name in names if name not in columns.names]
    batch = next(batches_of(raw, unused), None) if unused else None
    if batch is None:
        return None
    samples = {name: batch.columns[name][:SAMPLED_ROWS] for name in unused}
    prose = {name: texts for name, texts in samples.items() if _is_prose(texts)}
    if not prose:
        return None
    name = max(prose, key=lambda n: pc.mean(pc.utf8_length(prose[n])).as_py())
    return TextColumn(name, excerpt(prose[name].drop_null()[0]))


def _is_prose(texts: Any) -> bool:
    if not is_text(texts.type) or texts.null_count == len(texts):
        return False
    found = pc.match_substring_regex(texts.cast(pa.large_string()), PROSE)
    return bool(pc.mean(found.cast(pa.int8())).as_py() > 0.5)
