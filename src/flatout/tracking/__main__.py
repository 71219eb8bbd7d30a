"""Entry point of `python -m flatout.tracking FOLDER`: follow a run until it ends, or
send the remaining data of a run that has ended."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from flatout.tracking.follow import follow
from flatout.tracking.program import LevelFormatter


def main() -> None:
    parser = argparse.ArgumentParser("flatout.tracking", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of run.json")
    folder = parser.parse_args().folder
    handler = logging.StreamHandler()
    handler.setFormatter(LevelFormatter("%(asctime)s  %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").setLevel(logging.ERROR)
    logging.getLogger("flatout").setLevel(logging.INFO)
    try:
        follow(folder)
    except Exception as error:  # the run continues and reports the unsent data
        logging.getLogger("flatout").warning("tracking has ended: %s", error)


if __name__ == "__main__":
    main()
