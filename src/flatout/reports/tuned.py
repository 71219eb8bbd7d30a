"""Create the parameters.yml files of conf/tuned and conf/best. Each file also contains
the measurements from which its parameters were chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from flatout.engine.parameters.common import set_by_path
from flatout.reports.markdown import number_text

HEAD = """\
# Written by the benchmark; the next one that recommends something writes it again.
"""
TRAIN_WITH_IT = "# Train with it: kedro run --env=tuned, with the same --params.\n"
NOTHING_GAINED = "# No faster than the configured settings: kedro run does as well.\n"


def parameters_text(summary: Mapping[str, Any]) -> str:
    """Return the text of conf/tuned/parameters.yml for the summary of a benchmark, or
    "" if the benchmark recommends no settings."""
    tuned = summary.get("tuned")
    if not tuned:
        return ""
    comments, train = "", tuned["parameters"]["train"]
    if tuned["changes_optimisation"]:
        comments = (
            "# CHANGES THE OPTIMISATION: the global batch goes from "
            f"{summary['global_batch_size']} to {train['global_batch_size']}, the "
            f"learning\n# rate to {train['learning_rate']:.3g} "
            "(benchmark.learning_rate_rule). Check the validation loss.\n"
        )
    content = {**tuned["parameters"], "tuned": _source(tuned["provenance"])}
    advice = TRAIN_WITH_IT if tuned["gained"] else NOTHING_GAINED
    return HEAD + advice + comments + "\n" + yaml.safe_dump(content, sort_keys=False)


def interval_text(source: Mapping[str, Any]) -> str:
    """Return the range of samples/s over several trials, e.g. ` (trials: 160 to 181)`,
    or "" if the range is unknown."""
    low, high = source["samples_per_s_low"], source["samples_per_s_high"]
    if low is None:
        return ""
    return f" (trials: {number_text(low)} to {number_text(high)})"


def _source(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return the provenance with rounded numbers and without empty values. Later runs
    are compared with these values."""
    return {
        name: round(value, 1) if isinstance(value, float) else value
        for name, value in provenance.items()
        if value is not None
    }


BEST_HEAD = """\
# Written by the sweep; the next one that has a winner writes it again.
# Train with it: kedro run --env=best
"""


def best_text(best: Mapping[str, Any]) -> str:
    """Return the text of conf/best/parameters.yml: the settings of the best trial, its
    number, and its value of the metric that decided."""
    name = best["chosen_by"]
    source = {"trial_id": best["trial_id"], "chosen_by": name, name: best[name]}
    tree = {**set_by_path({}, best["settings"]), "best": source}
    return BEST_HEAD + "\n" + yaml.safe_dump(tree, sort_keys=False)
