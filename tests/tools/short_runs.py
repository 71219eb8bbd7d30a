"""Seconds that no step takes, beside a Trainer script that does the same, by turns.

    python -m tests.tools.short_runs --turns 3

Three rows: a training of one step, from the command to the prompt; a second `kedro run`
where the seed alone changed, without its steps and evaluation; the first new step
after a kill, beside the first step of a fresh script. The checkpoint has 2 layers of
width 32.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from flatout.engine.benchmark.journey.scripts import MODULE
from tests.tools.command_to_model import (
    journey,
    kedro,
    make_conf,
    make_job,
    phases,
    seconds,
    start,
)
from tests.tools.gpu_check import device_name

WORK = ("first_step", "steps", "evaluation")
UNTIL_STEP = ("imports", "data", "model", "first_step")
POLL_S = 0.02
KILL_AFTER = 8
"""Steps; a checkpoint is written at each fourth."""
ENDLESS = ("train.epochs=1000", "train.log_every=1", "train.checkpoint.every_steps=4")


def one_step(folder: Path, seed: int) -> dict[str, float]:
    flatout = kedro(
        *(folder, seed, "train.max_steps=1", "train.resume=never"), pipelines="train"
    )
    return {
        "flatout": seconds(flatout, folder),
        "Trainer": script(folder, max_steps=1)[0],
    }


def second_run(folder: Path, seed: int) -> dict[str, float]:
    whole_s = seconds(kedro(folder, seed), folder)
    found = phases(folder)
    script_s, of_script = script(folder)
    return {
        "flatout": whole_s - sum(found.get(name, 0.0) for name in WORK),
        "Trainer": script_s - sum(of_script[name] for name in WORK),
    }


def after_a_kill(folder: Path, seed: int) -> dict[str, float]:
    command = kedro(folder, seed, *ENDLESS, pipelines="train")
    points = folder / "data" / "08_reporting" / "train_metrics.jsonl"
    points.unlink(missing_ok=True)
    reached = kill_behind(command, folder, points, KILL_AFTER)
    begin = time.perf_counter()
    kill_behind(command, folder, points, reached + 1)
    flatout_s = time.perf_counter() - begin
    found = script(folder, max_steps=1)[1]
    return {"flatout": flatout_s, "Trainer": sum(found[name] for name in UNTIL_STEP)}


def script(folder: Path, **arguments: int) -> tuple[float, Mapping[str, float]]:
    """Seconds of a Trainer script, whole and by phase: the one of a journey of this
    job, with other `arguments`."""
    logs = folder / "data" / "08_reporting" / "benchmark_logs" / "journey"
    job = json.loads(next(logs.glob("*/job.json")).read_text())
    told = {**job["arguments"], **arguments}
    file = folder / "job.json"
    file.write_text(json.dumps({**job, "arguments": told, "started_s": time.time()}))
    whole_s = seconds(["-m", MODULE, str(file)], folder)
    return whole_s, json.loads(Path(job["result"]).read_text())["phases_s"]


def kill_behind(command: Sequence[str], folder: Path, points: Path, step: int) -> int:
    """Kill the command when it has noted `step`; the last step that it has noted."""
    process = start(command, folder)
    while (last := last_step(points)) < step and process.poll() is None:
        time.sleep(POLL_S)
    assert process.poll() is None, "it ended by itself"
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return last


def last_step(points: Path) -> int:
    if not points.is_file():
        return 0
    found = re.findall(rb'"step": ([0-9]+)', points.read_bytes())
    return max(map(int, found), default=0)


ROWS = {
    "one step, command to prompt": one_step,
    "second `kedro run`, another seed: beyond steps and evaluation": second_run,
    "first new step after a kill; of a fresh script": after_a_kill,
}


def show(turns: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    lines = [
        "| seconds, medians | flatout | Trainer script | ratio |",
        "|---|---|---|---|",
    ]
    for name, found in turns.items():
        ours, theirs = (median(t[k] for t in found) for k in ("flatout", "Trainer"))
        all_ours = ", ".join(f"{t['flatout']:.1f}" for t in found)
        all_theirs = ", ".join(f"{t['Trainer']:.1f}" for t in found)
        lines.append(
            f"| {name} | {ours:.1f} ({all_ours}) | {theirs:.1f} ({all_theirs}) | "
            f"{ours / theirs:.2f} |"
        )
    print("\n".join(lines), flush=True)  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rows", type=int, default=400)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flatout-") as name:
        folder = Path(name)
        make_job(folder, given.rows, layers=2, width=32)
        make_conf(folder, 1)
        seconds(kedro(folder, 0), folder)  # tokens, and every package's bytecode
        asked = journey(1, "flatout trainer-best")
        seconds(kedro(folder, 0, *asked, pipelines="benchmark"), folder)
        turns: dict[str, list[Mapping[str, float]]] = {row: [] for row in ROWS}
        for number in range(given.turns):
            for row, measure in ROWS.items():
                turns[row].append(measure(folder, number + 1))
            show(turns)
        print(f"on {device_name()}")  # noqa: T201


if __name__ == "__main__":
    main()
