"""Check results on a GPU: one line per part, exit code 1 if a part fails.

    python -m tests.tools.gpu_check
    python -m tests.tools.gpu_check --against ../another/checkout

`--against` also compares throughput with another checkout, in turns.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PROJECT = Path(__file__).parents[2]


def parts(against: Path | None) -> dict[str, list[str]]:
    """Return the arguments of `python` for each part. Kernels are only checked on a
    GPU, because Triton's interpreter takes minutes."""
    import torch

    found = {"tests": ["-m", "pytest", "-q", "tests/engine/test_gpu.py"]}
    if torch.cuda.is_available():
        found["tests"] += ["-n", "4"]
        found["kernels"] = ["-m", "tests.engine.kernel_checks"]
    if against is not None:
        place = ["--against", str(against.resolve())]
        found["rates"] = ["-m", "benchmarks.checkouts", *place]
    return found


def passes(name: str, arguments: Sequence[str]) -> bool:
    """Run a part, show its output, and return whether it passed."""
    path = os.pathsep.join([f"{PROJECT / 'src'}", os.environ.get("PYTHONPATH", "")])
    begin_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    told = f"FAILED, exit code {done.returncode}" if done.returncode else "ok"
    print(f"{name}: {told}, {time.monotonic() - begin_s:.0f} s", flush=True)  # noqa: T201
    return not done.returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if all parts passed, or 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--against", type=Path, help="checkout to compare rates with")
    options = parser.parse_args(arguments)
    ends = [passes(*part) for part in parts(options.against).items()]
    return 0 if all(ends) else 1


if __name__ == "__main__":
    raise SystemExit(main())
