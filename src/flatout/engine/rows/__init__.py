"""Kinds of rows, each in its own module: a subclass of `SplitRows`.

`train.rows` is the name of a kind (`SplitRows.kind`) or the dotted path of a custom
class, whose samples have one shape because they have no tokenizer that could pad them.
Importing a class registers it for the column that contains its samples.
"""

from __future__ import annotations

from flatout.engine.parameters import Settings, SettingsError, near_or_all
from flatout.engine.parameters.own_parts import own_part
from flatout.engine.rows.arrays import ArrayRows
from flatout.engine.rows.encoded_images import EncodedImages
from flatout.engine.rows.rows import SplitRows
from flatout.engine.rows.tokens import TokenRows

KINDS = {kind.kind: kind for kind in (TokenRows, ArrayRows, EncodedImages)}


def row_kind(name: str) -> type[SplitRows]:
    """Return the class for `train.rows`, or raise SettingsError if there is none."""
    if "." not in name and name not in KINDS:
        near = near_or_all(name, KINDS)
        raise SettingsError(f"train.rows: there are no rows {name!r}; {near}")
    found = KINDS.get(name) or own_part(name, "train.rows")
    if name in KINDS or (isinstance(found, type) and issubclass(found, ArrayRows)):
        return found
    raise SettingsError(
        f"train.rows: {name} does not derive from {ArrayRows.__module__}.ArrayRows"
    )


def max_length(settings: Settings) -> int:
    """Return the maximum length of a row in tokens, or 1 for samples of one shape."""
    kind = row_kind(settings.train.rows)
    return 1 if kind.one_shape else settings.tokenize.max_length
