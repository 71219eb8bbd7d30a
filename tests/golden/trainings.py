"""Train the configurations of the golden record, and record their results."""

import pickle
import re
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from safetensors.numpy import load_file

from tests.forks import fork_two
from tests.golden.configurations import CLASSES, TRAININGS
from tests.golden.engine import (
    ArrayRows,
    Stepper,
    TokenRows,
    TrainJob,
    Vocabulary,
    parse_settings,
    set_up,
    train,
)
from tests.golden.points import read_points

VOCABULARY = Vocabulary(100, 0, mask_token_id=4, special_token_ids=(0, 1, 2, 3, 4))
LABELS = ("a", "b", "c")
MAX_LENGTH, BLOCK = 24, 16
TRAIN = {
    "global_batch_size": 16,
    "token_budget": 120,
    "epochs": 3,
    "max_steps": 5,
    "log_every": 1,
    "metrics_every": 2,
    "learning_rate": 1e-2,
    "warmup_fraction": 0.2,
    # Larger than the rounding errors of gradients that should be zero (a key's bias).
    "adam_epsilon": 1e-4,
}
COUNTS = {"train": 60, "validation": 20, "test": 21}
OWN_KEYS = {"config", "task", "rows", "ranks", "model", "runtime", "killed_before"}


class Killed(BaseException):
    """Leaves the same state as a kill, but without ending the process."""


# --- rows ---


def rows_of(kind: str, task: str, count: int) -> Any:
    """Return rows of 3 to 24 tokens, or numeric samples, with the labels of `task`."""
    draw = np.random.default_rng([count, 7])
    if kind == "arrays":
        return _arrays(draw, task, count)
    if kind == "images":
        labels = np.arange(count) % 3
        pixels = draw.integers(
            0, 80 + 80 * labels[:, None, None, None], (count, 8, 8, 3)
        )
        return _samples(pixels.astype(np.uint8), labels)
    lengths = draw.integers(3, MAX_LENGTH + 1, count)
    rows = [[1, *draw.integers(5, 100, n - 2).tolist(), 2] for n in lengths]
    columns = {"input_ids": pa.array(rows, pa.list_(pa.int32()))}
    if kind == "joined":
        return _joined(np.concatenate(rows), lengths)
    if kind == "pairs":
        types = [[int(i >= len(row) // 3) for i in range(len(row))] for row in rows]
        columns["token_type_ids"] = pa.array(types, pa.list_(pa.int8()))
    labels = _labels(kind, task, rows)
    return TokenRows(pa.table(columns | ({} if labels is None else {"labels": labels})))


def _labels(kind: str, task: str, rows: list[list[int]]) -> Any:
    """Return labels for each row or for each token."""
    numbers = np.array([sum(row) for row in rows])
    if kind == "completions":
        cut = [len(row) // 3 for row in rows]
        known = zip(rows, cut, strict=True)
        found = [[-100] * (n + 1) + row[n + 1 :] for row, n in known]
        return pa.array(found, pa.list_(pa.int32()))
    if task == CLASSES:
        return pa.array(numbers % 7 % 3)
    if task == "regression":
        return pa.array(numbers / 1000)
    if task == "multi-label-classification":
        flags = np.stack([numbers % 2, numbers // 2 % 2, numbers % 3 == 0], 1)
        return pa.array(flags.tolist(), pa.list_(pa.float32(), 3))
    if task == "token-classification":
        tags = [[i % 3 if i % 4 else -100 for i in row] for row in rows]
        return pa.array(tags, pa.list_(pa.int32()))
    return None


def _joined(ids: Any, lengths: Any) -> Any:
    """Return documents concatenated into blocks of 16 tokens, with their lengths."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    starts = range(0, len(ids), BLOCK)
    parts = [np.unique(owner[at : at + BLOCK], return_counts=True)[1] for at in starts]
    blocks = {
        "input_ids": pa.array([ids[at : at + BLOCK] for at in starts]),
        "document_lengths": pa.array([part.tolist() for part in parts]),
    }
    table = {n: c.cast(pa.list_(pa.int32())) for n, c in blocks.items()}
    return TokenRows(pa.table(table))


def _arrays(draw: Any, task: str, count: int) -> Any:
    labels = draw.integers(0, 3, count)
    values = draw.normal(size=(count, 2, 3)) * 4 + labels[:, None, None]
    targets = values.mean((1, 2)) if task == "regression" else labels
    return _samples(values.astype(np.float32), targets)


def _samples(values: Any, labels: Any) -> Any:
    """Return rows of values (N, ...), stored in Arrow as nested lists of fixed size."""
    array = pa.array(values.reshape(-1))
    for size in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return ArrayRows(pa.table({"inputs": array, "labels": labels}))


# --- jobs ---


def job_of(folder: Path, asked: Mapping[str, Any]) -> Any:
    """Return the training job that `asked` describes. Raises SettingsError."""
    kind, task = asked.get("rows", "tokens"), asked["task"]
    own = {k: v for k, v in asked.items() if k not in OWN_KEYS | {"then", "words"}}
    samples = kind in ("arrays", "images")
    settings = {
        "runtime": {"precision": "fp32", "threads": 1, **asked.get("runtime", {})},
        "model": {"task": task, "config": asked["config"], **asked.get("model", {})},
        "tokenize": {"max_length": MAX_LENGTH},
        "images": {"size": 8},
        "train": {
            **TRAIN,
            "rows": kind if samples else "tokens",
            **own,
            "distributed": {"num_processes": 1, **own.get("distributed", {})},
        },
    }
    named = task not in ("regression",) and "lm" not in task and task != "next-key"
    return TrainJob(
        parse_settings(settings),
        *(rows_of(kind, task, count) for count in COUNTS.values()),
        None if samples else VOCABULARY,
        LABELS if named else (),
        folder / "run",
        folder / "metrics.jsonl",
        "golden",
    )


# --- runs ---


def trained(names: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Train the configurations `names`, and return their results by name."""
    pairs = [name for name in names if TRAININGS[name].get("ranks") == 2]
    found = {
        n: _entry(n, folder / str(i)) for i, n in enumerate(names) if n not in pairs
    }
    if pairs:
        two = folder / "two"
        two.mkdir(parents=True)
        fork_two(_train_each, pairs, two)
        found |= pickle.loads((two / "found").read_bytes())  # noqa: S301
    return {name: found[name] for name in names}


def _entry(
    name: str, folder: Path, group: Any = None, runtime: Any = None
) -> dict[str, Any]:
    """Return the results of one configuration on this rank."""
    asked, steps = TRAININGS[name], {}
    folder.mkdir(parents=True, exist_ok=True)
    result = None
    try:
        job = job_of(folder, asked)
        own = runtime or set_up(job.settings.runtime)
        if group is not None:
            group = replace(group, settings=job.settings.train.distributed)
        if "killed_before" in asked:
            with _noting(steps, asked["killed_before"]):
                _until_killed(job, own, group)
            job = job_of(folder, asked | asked.get("then", {}))
        with _noting(steps):
            result = train(job, own, group)
        status, message = result.report.exit_reason, ""
    except Exception as error:
        status = "refused" if isinstance(error, ValueError) else "failed"
        message = str(error)
    words = [word for word in asked.get("words", []) if word in message]
    entry = {"status": status, "words": words}
    if status in ("refused", "failed") and not asked.get("words"):
        entry["message"] = message
    return entry | (_figures(folder, steps, result) if result else {})


def _until_killed(job: Any, runtime: Any, group: Any) -> None:
    try:
        train(job, runtime, group)
    except Killed:
        return
    raise AssertionError("this training should have been killed")


@contextmanager
def _noting(steps: dict[int, Any], killed_before: int | None = None):
    """Record the values that the optimizer sees at each step in `steps`."""
    step = Stepper.__call__

    def noted(stepper: Any, batch: Any) -> None:
        if batch.step == killed_before:
            raise Killed
        steps[batch.step] = {
            "rows": sorted(batch.row_ids.tolist()),
            "targets": batch.num_targets,
            "tokens": batch.num_tokens,
            "divisor": float(batch.divisor),
        }
        step(stepper, batch)

    Stepper.__call__ = noted
    try:
        yield
    finally:
        Stepper.__call__ = step


def _figures(folder: Path, steps: dict[int, Any], result: Any) -> dict[str, Any]:
    """Return the values of the steps, the points and the report."""
    if not (file := folder / "metrics.jsonl").exists():
        return {}  # another rank has it
    points, timed = read_points(file)
    names = ("initial_loss", "final_loss", "chance_loss", "steps", "samples", "epochs")
    names += ("strategy", "parameters", "resumed_from_step")
    return {
        "steps": [steps[number] for number in sorted(steps)],
        "points": points,
        "timed": timed,
        "report": {name: getattr(result.report, name) for name in names},
        "best": re.sub(r"\D", "", result.model_folder.name),
        "weights": digest(result.last_model_folder),
    }


def digest(folder: Path) -> str:
    """Return the SHA-256 of all weights in `folder`, in the order of their names."""
    whole = sha256()
    for name, weights in sorted(load_file(folder / "model.safetensors").items()):
        whole.update(name.encode() + weights.tobytes())
    return whole.hexdigest()


# --- two ranks ---


def _train_each(runtime: Any, group: Any, names: list[str], folder: Path) -> None:
    found = {n: _entry(n, folder / str(i), group, runtime) for i, n in enumerate(names)}
    if runtime.ranks.is_main:
        (folder / "found").write_bytes(pickle.dumps(found))
