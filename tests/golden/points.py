"""Read the metrics that a training run wrote, step by step."""

import json
import re
from pathlib import Path

TIMED = re.compile(r"second|wait|memory|utilization|mfu|tflops|gib|_ms|_pct")
"""Parts of the names of metrics that differ between equal runs."""


def read_points(file: Path) -> tuple[dict[str, float], list[str]]:
    """Return the last values by step and name, and the names of timing metrics."""
    points, timed = {}, set()
    for line in file.read_text().splitlines():
        point = json.loads(line)
        for key, value in point["metrics"].items():
            if TIMED.search(key):
                timed.add(key)
            else:
                points[point["step"], key] = value
    return {f"{step} {key}": points[step, key] for step, key in sorted(points)}, sorted(
        timed
    )
