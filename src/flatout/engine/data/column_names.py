"""What to say where a column that the parameters name is not there."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

DELIMITERS = {";": '";"', "\t": r'"\t"', "|": '"|"'}
"""What may stand between columns, and how it is written in YAML."""


def listed(present: Sequence[str]) -> str:
    return ", ".join(map(repr, present)) or "none"


def column_faults(
    present: Sequence[str], wanted: Mapping[str, str | None], entry: str
) -> str | None:
    """What is wrong with the columns that `wanted` names by parameter, the nearest
    names and what to set; None where all is well. `entry` is the catalog's."""
    wrong = {
        parameter: name
        for parameter, name in wanted.items()
        if name is not None and present.count(name) != 1
    }
    if not wrong:
        return None
    delimiter = _other_delimiter(present)
    faults = [
        f"{parameter} is {name!r}, which is "
        + ("there twice" if name in present else "not there")
        + ("" if delimiter or name in present else _near(name, present))
        for parameter, name in wrong.items()
    ]
    advice = "Set the names in conf/local/parameters.yml"
    if delimiter:
        advice = (
            f"The one column looks like several with {delimiter} between them: set "
            f"delimiter: {delimiter} for {entry} in conf/local/catalog.yml "
            f"(pandas.CSVDataset: load_args: {{sep: {delimiter}}})"
        )
    return ". ".join([*faults, advice])


def _near(name: str, present: Sequence[str]) -> str:
    """The nearest name, case and spaces around it aside."""
    forms = {other.strip().casefold(): other for other in present}
    near = difflib.get_close_matches(name.strip().casefold(), forms, n=1, cutoff=0.4)
    return f" (did you mean {forms[near[0]]!r}?)" if near else ""


def _other_delimiter(present: Sequence[str]) -> str | None:
    """As YAML, what stands between the names of a header that was not cut."""
    if len(present) != 1:
        return None
    found = (text for mark, text in DELIMITERS.items() if mark in present[0])
    return next(found, None)
