"""Seconds from the command to the model of a training that is compiled in four ways.

    python -m tests.tools.late_compile                          # one H200: 8 minutes
    python -m tests.tools.late_compile --steps 900 --carried-steps 200 --warm \\
        --ways now late carried                                 # the same: 3 minutes
    python -m tests.tools.late_compile --layers 1 --width 64 --batch 16 --steps 200 \\
        --batching grouped                                      # a rehearsal

`off`: uncompiled. `now`: compiled from its first step. `late`: from a later one, while
another process compiles. `carried`: as `now`, with what that one compiled in a file.
Each begins with empty caches. The checkpoint has the width and layers of BERT-base, and
its rows are first words of docstrings.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.tools.command_to_model import kedro, make_conf, make_job, seconds
from tests.tools.gpu_check import device_name

WAYS = {
    "off": "false",
    "now": "true",
    "late": "late",
    "carried": "true",
    "auto": "auto",
}
SHOWN = ("model", "compilation", "first_step", "steps")


def run(folder: Path, way: str, parameters: list[str]) -> dict[str, Any]:
    """Seconds, and the report of the training."""
    for name in ("compiled", ".triton"):
        shutil.rmtree(folder / name, ignore_errors=True)
    found: dict[str, Any] = {}
    file = str(folder / "compiled.zip")
    if way == "carried":
        found["import_s"] = cache("import", file, folder)
    given = [*parameters, f"train.compile={WAYS[way]}"]
    before_s = cpu_s()
    found["s"] = seconds(kedro(folder, 1, *given, pipelines="train"), folder)
    found["cpu_s"] = cpu_s() - before_s
    if way == "now":
        found["export_s"] = cache("export", file, folder)
        found["MB"] = os.path.getsize(file) / 1e6
    report = folder / "data" / "08_reporting" / "train_report.json"
    return found | {"report": json.loads(report.read_text())}


def cpu_s() -> float:
    """Of all processes that this one has waited for."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def cache(command: str, file: str, folder: Path) -> float:
    return seconds(["-m", "kedro", "flatout", "compile-cache", command, file], folder)


def line(way: str, found: dict[str, Any]) -> str:
    report = found["report"]
    phases = " | ".join(f"{report['phases_s'].get(n, 0.0):.1f}" for n in SHOWN)
    rate, first = report["samples_per_s"], report["compiled_from_step"]
    return (
        f"| {way} | {found['s']:.1f} | {phases} | {first} | {rate:,.0f} | "
        f"{report['final_loss']:.4f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument(
        "--carried-steps", type=int, help="Where `carried` needs no whole training."
    )
    parser.add_argument(
        "--warm", action="store_true", help="All packages have their bytecode."
    )
    parser.add_argument("--batch", type=int, default=1_024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rows", type=int, default=14_000)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--batching", default="auto")
    parser.add_argument(
        "--ways", nargs="+", default=["off", "now", "late", "carried"], choices=WAYS
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flatout-") as name:
        folder = Path(name)
        os.environ["TRITON_HOME"] = name
        make_job(folder, given.rows, given.layers, given.width)
        make_conf(folder, 10_000)
        parameters = [
            f"train.max_steps={given.steps}",
            f"train.global_batch_size={given.batch}",
            f"train.batching={given.batching}",
            "train.evaluate_every=1000000",
            "train.resume=never",
        ]
        tokens = kedro(folder, 0, pipelines="split,tokenize")
        seconds(tokens, folder)
        few = ["train.max_steps=2", *parameters[1:], "train.compile=false"]
        if not given.warm:
            seconds(kedro(folder, 0, *few, pipelines="train"), folder)
        show("| way | s | " + " | ".join(SHOWN) + " | from step | samples/s | loss |")
        show("|---" * 9 + "|")
        for _ in range(given.turns):
            for way in given.ways:
                told = list(parameters)
                if way == "carried" and given.carried_steps:
                    told[0] = f"train.max_steps={given.carried_steps}"
                found = run(folder, way, told)
                show(line(way, found))
                beside = {n: round(v, 1) for n, v in found.items() if n != "report"}
                show(f"  {found['report']['compile_reason']} {beside}")
        show(f"on {device_name()}")


def show(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
