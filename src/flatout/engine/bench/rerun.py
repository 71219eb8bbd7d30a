"""A trial again, by hand: `python -m flatout.engine.bench.rerun FOLDER`.

Starts what the sweep started: the same module, ranks and environment, but its output
comes to the terminal, and no time or memory limit ends it. Leaves FOLDER/result.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from flatout.engine.bench.trial_spec import TrialSpec
from flatout.engine.bench.trials import command, environment, one_gpu


def rerun(folder: Path) -> int:
    """Measure the trial in `folder` once more; 0 where it ended well."""
    spec = TrialSpec.from_json(json.loads((folder / "spec.json").read_text())["spec"])
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    variables = environment(spec, one_gpu(spec.world_size))
    status = subprocess.call(command(spec, folder), env=variables)
    if not result.exists():
        sys.stdout.write(f"ended with status {status} and no result: see above\n")
        return 1
    answer = json.loads(result.read_text())
    said = f"{answer['status']}: {answer['note'] or 'measured'}; figures: {result}"
    sys.stdout.write(f"{said}\n")
    return 0 if answer["status"] == "ok" else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="benchmark_logs/<mode>/<key>")
    folder = parser.parse_args().folder
    if not (folder / "spec.json").exists():
        parser.error(f"{folder / 'spec.json'} does not exist: name a trial's folder")
    return rerun(folder)


if __name__ == "__main__":
    raise SystemExit(main())
