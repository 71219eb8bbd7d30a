"""conf/best/parameters.yml: the settings of the training that won a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from flatout.engine.parameters.common import set_by_path

HEAD = """\
# Written by the sweep; the next one that has a winner writes it again.
# Train with it: kedro run --env=best
"""


def parameters_text(best: Mapping[str, Any]) -> str:
    """Return the file's text. Its last group contains the origin of the settings."""
    name = best["chosen_by"]
    source = {"trial_id": best["trial_id"], "chosen_by": name, name: best[name]}
    tree = {**set_by_path({}, best["settings"]), "best": source}
    return HEAD + "\n" + yaml.safe_dump(tree, sort_keys=False)
