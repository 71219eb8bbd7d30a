"""A small training run for the fault drill: `python -m tests.tools.victim F`.

F/victim.json contains the options of :class:`Victim`. The run resumes if it was
interrupted. When it has finished, F/outcome.json contains the results that must not
depend on the faults.
"""

import json
import logging
import resource
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from flatout.engine.machine.watchdog import heartbeat

OPTIONS, OUTCOME, BEATS = "victim.json", "outcome.json", "beats"
TEMPORARY = "temporary"
"""Folder in which the ranks write their heartbeats, if there are several."""
VOCABULARY_SIZE, MAX_LENGTH, LABELS = 200, 32, 4


@dataclass(frozen=True)
class Victim:
    """Options of a run with dropout, several micro-batches per step, and
    evaluations."""

    max_steps: int = 200
    world_size: int = 1
    file_limit_bytes: int | None = None
    """Maximum size of a file. Simulates a full disk."""

    def settings(self) -> dict[str, Any]:
        train = {
            "global_batch_size": 16,
            "token_budget": 160,
            "epochs": 1000,
            "max_steps": self.max_steps,
            "learning_rate": 1e-3,
            "log_every": 4,
            "evaluate_every": 7,
            "checkpoint": {"every_steps": 5, "keep": 2},
            "distributed": {"num_processes": self.world_size},
            "compile": False,
        }
        config = {
            "model_type": "bert",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": MAX_LENGTH,
        }
        return {
            "runtime": {
                "precision": "fp32",
                "threads": 1,
                "deterministic": True,  # results are compared bit for bit, also on GPUs
            },
            "model": {"config": config},
            "tokenize": {"max_length": MAX_LENGTH},
            "train": train,
        }

    def start_in(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / OPTIONS).write_text(json.dumps(asdict(self)), encoding="utf-8")


def token_rows(rows: int, seed: int = 0) -> Any:
    """Return rows of 3 to MAX_LENGTH tokens with labels that can be learned."""
    from flatout.engine.rows.tokens import TokenRows

    rng = np.random.default_rng([seed, rows])
    lengths = rng.integers(3, MAX_LENGTH + 1, rows)
    ids = [rng.integers(5, VOCABULARY_SIZE, length).tolist() for length in lengths]
    columns = {
        "input_ids": pa.array(ids, pa.list_(pa.int32())),
        "labels": pa.array([row[0] % LABELS for row in ids], pa.int64()),
    }
    return TokenRows(pa.table(columns))


def make_job(victim: Victim, folder: Path) -> Any:
    from flatout.engine.parameters import parse_settings
    from flatout.engine.rows.vocabulary import Vocabulary
    from flatout.engine.train.setup.job import TrainJob

    return TrainJob(
        settings=parse_settings(victim.settings()),
        train=token_rows(400),
        validation=token_rows(80, seed=1),
        test=token_rows(80, seed=2),
        vocabulary=Vocabulary(VOCABULARY_SIZE, 0, None, (0, 1, 2)),
        label_names=tuple("abcd"),
        work_folder=folder / "run",
        metrics_file=folder / "metrics.jsonl",
        data_key="victim",
    )


def outcome(result: Any) -> dict[str, Any]:
    """Return learning curves as hexadecimal floats, and hashes of the weights."""
    from flatout.engine.files.content_key import file_hash

    return {
        "history": [
            [p.step, p.loss.hex(), p.grad_norm.hex(), p.learning_rate.hex()]
            for p in result.history
        ],
        "best": file_hash(result.model_folder / "model.safetensors"),
        "last": file_hash(result.last_model_folder / "model.safetensors"),
        "test_loss": result.report.test_loss.hex(),
        "initial_loss": result.report.initial_loss.hex(),
    }


def main(folder: Path) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    victim = Victim(**json.loads((folder / OPTIONS).read_text(encoding="utf-8")))
    if victim.world_size == 1:
        heartbeat.start(folder / BEATS, 0)
    else:
        (folder / TEMPORARY).mkdir(exist_ok=True)
        tempfile.tempdir = str(folder / TEMPORARY)
    if victim.file_limit_bytes is not None:
        limit = victim.file_limit_bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    from flatout.engine.checkpoints.checkpoint_folder import finish
    from flatout.engine.files.atomic_write import write_text
    from flatout.engine.launch.launch import collect

    job = make_job(victim, folder)
    result = collect(job)
    write_text(folder / OUTCOME, json.dumps(outcome(result)))
    finish(job.work_folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
