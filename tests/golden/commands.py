"""Run `kedro run` on small data of every kind, and record its results."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from PIL import Image

import flatout
from tests import warm
from tests.golden.points import read_points

SMALL = {
    "runtime": {"threads": 1, "precision": "fp32"},
    "model": {
        "config": {
            "model_type": "bert",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 128,
            "initializer_range": 0.2,
        }
    },
    "tokenize": {"max_length": 24, "vocab_size": 200},
    "train": {
        "max_steps": 4,
        "log_every": 1,
        "loader": {"num_workers": 0},
    },
    "tracking": {"log_model": False, "system_metrics": False},
}
LLAMA = {
    "model_type": "llama",
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
NO_LABEL = {"label_column": None}
CAUSAL = {"task": "causal-lm", "config": LLAMA}
SAMPLES = (
    "train.max_steps=4,train.log_every=1,runtime.precision=fp32,runtime.threads=1,"
    "tracking.log_model=false,tracking.system_metrics=false"
)
COMMANDS: dict[str, dict[str, Any]] = {
    "kedro run, texts": {"split": {"group_column": "group"}},
    "kedro run, several labels": {
        "model": {"task": "multi-label-classification"},
        "split": {"label_column": None, "label_columns": ["short", "even"]},
    },
    "kedro run, tags": {
        "model": {"task": "token-classification"},
        "split": {"text_column": "words", "label_column": "tags"},
    },
    "kedro run, completions": {
        "model": CAUSAL,
        "split": {"prompt_column": "text", "completion_column": "answer", **NO_LABEL},
    },
    "kedro run, joined texts": {
        "model": CAUSAL,
        "split": NO_LABEL,
        "tokenize": {"join_texts": True},
    },
    "kedro run, arrays": {
        "arguments": ["--env=arrays", "--params=arrays.path=a.npz," + SAMPLES]
    },
    "kedro run, images": {
        "arguments": ["--env=images", "--params=images.path=images," + SAMPLES]
    },
    "kedro run, unknown parameter": {
        "train": {"learning_rat": 1},
        "words": ["learning_rate"],
    },
    "kedro run, no such column": {
        "split": {"text_column": "txet"},
        "words": ["txet", "text"],
    },
    "kedro run, no such pipeline": {
        "arguments": ["--pipelines=trian"],
        "words": ["trian"],
    },
}
"""The parameters of each command, its `arguments`, and `words` in its output."""
KEYS = {"arguments", "words"}


OWN = {
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_OFFLINE": "1",
}


def ran(
    names: list[str], folder: Path, store: Path | None = None
) -> dict[str, dict[str, Any]]:
    """Run the commands `names` in one project each below `folder`, and return their
    results. `store` is a tracking store without runs."""
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    return {
        name: _entry(COMMANDS[name], folder / str(i), store)
        for i, name in enumerate(names)
    }


def _entry(
    asked: Mapping[str, Any], folder: Path, store: Path | None
) -> dict[str, Any]:
    make_project(folder, {k: v for k, v in asked.items() if k not in KEYS})
    if store:
        (folder / "data").mkdir()
        shutil.copy(store, folder / "data/mlflow.db")
    output = folder / "output"
    command = ["run", *asked.get("arguments", [])]
    status = warm.start(command, output, folder, OWN).wait()
    text = output.read_text(errors="replace")
    entry = {
        "status": status,
        "words": [word for word in asked.get("words", []) if word in text],
        "traceback": "Traceback (most recent call last)" in text,
    }
    return entry | (_left(folder / "data") if status == 0 else {})


# --- the project ---


def make_project(folder: Path, parameters: Mapping[str, Any]) -> None:
    """Copy this checkout's project, and add raw data and settings in conf/local."""
    checkout = Path(flatout.__file__).parents[2]
    others = shutil.ignore_patterns("local", "tuned", "best")
    shutil.copytree(checkout / "conf", folder / "conf", ignore=others)
    shutil.copy(checkout / "pyproject.toml", folder)
    (folder / "src").mkdir()  # this process has already imported flatout
    (folder / ".telemetry").write_text("consent: false\n")
    local = folder / "conf" / "local"
    local.mkdir()
    raw = {"type": "flatout.datasets.TextFiles", "filepath": "raw.jsonl"}
    if parameters:
        (local / "catalog.yml").write_text(yaml.safe_dump({"raw_texts": raw}))
        text = yaml.safe_dump(_merged(SMALL, parameters))
        (local / "parameters.yml").write_text(text)
    write_raw(folder)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    both = {k for k in above if isinstance(above[k], dict) and k in below}
    return {**below, **above, **{k: _merged(below[k], above[k]) for k in both}}


def write_raw(folder: Path) -> None:
    """Write texts of every form, some of them invalid, and numbers and images."""
    draw = np.random.default_rng(3)
    words = np.array("a red fox jumps over the lazy dog and runs far from home".split())
    with (folder / "raw.jsonl").open("w") as file:
        for number in range(200):
            chosen = words[draw.integers(0, len(words), draw.integers(3, 15))].tolist()
            row = {
                "text": " ".join(chosen) + f" {number % 90}",
                "answer": " ".join(chosen[::-1]),
                "label": ["left", "right", "middle"][chosen.count("fox") % 3],
                "short": int(len(chosen) < 9),
                "even": int(len(chosen) % 2 == 0),
                "group": f"g{number % 50}",
                "words": chosen,
                "tags": ["B-PER" if word == "fox" else "O" for word in chosen],
            }
            if number == 17:
                row |= {"text": " ", "words": [], "tags": []}
            file.write(json.dumps(row) + "\n")
    labels = draw.integers(0, 3, 200)
    values = draw.normal(size=(200, 4)) + labels[:, None]
    values[11, 2] = np.nan
    np.savez(folder / "a.npz", inputs=values.astype(np.float32), label=labels)
    for number in range(120):
        pixels = draw.integers(0, 100 + 100 * (number % 2), (8, 8)).astype(np.uint8)
        place = folder / "images" / ("dark", "light")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{number:03d}.png")


# --- results ---


def _left(data: Path) -> dict[str, Any]:
    """Return the rows of each split, digests of tokens, and metrics."""
    rejected = sorted((data / "02_intermediate").glob("rejected_*.parquet"))
    report = json.loads((data / "08_reporting/train_report.json").read_text())
    names = ("samples", "steps", "initial_loss", "final_loss", "strategy", "parameters")
    points, timed = read_points(data / "08_reporting/train_metrics.jsonl")
    return {
        "rejected": [_rows(pq.read_table(file)) for file in rejected],
        "rows": {f.name: _rows(_arrow(f)) for f in _folders(data / "03_primary")},
        "inputs": {
            f.name: _facts(_arrow(f)) for f in _folders(data / "05_model_input")
        },
        "labels": _json(data / "06_models/label_names.json"),
        "points": points,
        "timed": timed,
        "report": {name: report[name] for name in names},
        "predictions": _predictions(data / "07_model_output"),
    }


def _folders(folder: Path) -> list[Path]:
    """Return the folders of the splits."""
    known = re.compile(r"(train|validation|test)_[a-z]+")
    return [f for f in sorted(folder.glob("*")) if known.fullmatch(f.name)]


def _arrow(folder: Path) -> Any:
    files = sorted(folder.glob("*.arrow"))
    tables = [pa.ipc.open_stream(str(file)).read_all() for file in files]
    return pa.concat_tables(tables)


def _rows(table: Any) -> list[Any]:
    """Return the identifiers of the rows in the raw data."""
    names = [n for n in ("source_row", "row", "source") if n in table.column_names]
    return table.column(names[0]).to_pylist()


def _facts(table: Any) -> dict[str, Any]:
    """Return the number of rows, and a digest of each column that a model reads."""
    known = ("input_ids", "labels", "token_type_ids", "document_lengths", "inputs")
    found = {"rows": table.num_rows}
    for name in known:
        if name in table.column_names:
            values = json.dumps(table.column(name).to_pylist())
            found[name] = sha256(values.encode()).hexdigest()[:16]
    if "source" in table.column_names:
        found["source"] = table.column("source").to_pylist()
    return found


def _json(file: Path) -> Any:
    return json.loads(file.read_text()) if file.exists() else None


def _predictions(folder: Path) -> dict[str, Any]:
    """Return the predictions for the test split, without texts."""
    files = sorted(folder.glob("test_predictions.parquet"))
    if not files:
        return {}
    table = pd.read_parquet(files[0])
    kept = [n for n in table.columns if n.split("_")[0] in ("label", "probability")]
    return {name: [_plain(v) for v in table[name]] for name in kept}


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
