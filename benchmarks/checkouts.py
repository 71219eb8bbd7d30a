"""Compare the training throughput of this checkout with that of another one.

    python -m benchmarks.checkouts --against ../before
    python -m benchmarks.checkouts --against ../before --small --turns 1

Both sides run the benchmark scripts of this checkout, but each imports its own flatout.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import encoders, images, language_models, lstms
from benchmarks.harness import PROJECT, Figures, Script, main, parser_of

SOURCES = {
    **dict.fromkeys(encoders.SHAPES, encoders.flatout),
    **dict.fromkeys(language_models.SHAPES, language_models.flatout),
    **dict.fromkeys(images.MODELS, images.flatout),
    **dict.fromkeys(lstms.SCRIPT.cases, lstms.flatout),
}
"""Maps each case to the function that measures its throughput."""


def rate(given: argparse.Namespace) -> Figures:
    found = SOURCES[given.case](given)
    if "samples_per_s" not in found:
        found["samples_per_s"] = found["tokens_per_s"]
    return found


SIDES = {"this checkout": rate, "the other": rate}
SCRIPT = Script(
    "benchmarks.checkouts",
    "this checkout compared with another one",
    dict.fromkeys(SOURCES, SIDES),
    checkouts={"the other": "against"},
    small_cases=("batch 16",),
)


def run() -> int:
    parser = parser_of(SCRIPT)
    parser.add_argument("--against", type=Path, default=PROJECT, help="other checkout")
    return main(SCRIPT, parser)


if __name__ == "__main__":
    raise SystemExit(run())
