"""The metrics that a training wrote, step by step."""

import json
import re
from pathlib import Path

TIMED = re.compile(r"second|wait|memory|utilization|mfu|tflops|gib|_ms|_pct")
"""In names of metrics that no two runs share."""


def read_points(file: Path) -> tuple[dict[str, float], list[str]]:
    """By step and name, the last value; and the names of those that are times."""
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
