"""Wrong predictions: validation rows for people to read during training.

For tasks with one target per row. This is a pause like an evaluation: its time is in no
window, and it uses no random number of the training. All ranks gather sharded weights
at once, so all of them pass the same rows; the main rank reports them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from flatout.engine.machine.watchdog import heartbeat
from flatout.engine.rows.layout import Ints
from flatout.engine.tasks import Judged
from flatout.engine.train.evaluate import EVALUATION_EPOCH, evaluating
from flatout.engine.train.keeping.oom import evaluate_within_memory, evaluation_budget
from flatout.engine.train.recording.progress import evaluations
from flatout.engine.train.setup.assemble import Trainer
from flatout.engine.train.setup.job import TrainJob, as_numbers, decoder
from flatout.engine.train.setup.step_data import make_collator, make_planner

logger = logging.getLogger(__name__)

FILE_NAME = "wrong_rows.jsonl"
SHOWN = 5
SAMPLED_ROWS = 128


@dataclass(frozen=True)
class WrongRow:
    """One line of the file."""

    step: int
    row: int
    """Number of the row in validation_tokens."""
    text: str
    label: str | float
    prediction: str | float
    score: float | None
    """Probability of the prediction, if it has one."""
    loss: float


class WrongRows:
    """Finds wrong rows every `train.error_analysis_every` steps and at the end."""

    def __init__(self, trainer: Trainer) -> None:
        job = trainer.job
        self._trainer = trainer
        self._every = job.settings.train.error_analysis_every
        if not job.task.head_kind.one_a_row or job.task.whole_batch:
            self._every = None
        # Read now: another tokenizer may be stored there later.
        self._decode = decoder(job) if self._every else None
        self._path = job.metrics_file.with_name(FILE_NAME)
        self._is_main = trainer.runtime.ranks.is_main

    def start(self, start_step: int) -> None:
        """Remove the lines of later steps: for a new run, all lines."""
        if self._is_main and self._path.is_file():
            known = self._path.read_text(encoding="utf-8", errors="replace")
            self._write("w", "".join(_lines_until(start_step, known)))

    def due(self, done: int) -> bool:
        if self._every is None:
            return False
        return evaluations(done - 1, done, self._trainer.total_steps, self._every) == 1

    def look(self, done: int) -> None:
        """Write the worst rows of a sample chosen by seed and step."""
        trainer, split = self._trainer, self._trainer.job.validation
        judged = evaluate_within_memory(trainer, split, lambda: _judge(trainer, done))
        if not self._is_main:
            return
        wrong = [(row, found) for row, found in judged if found.wrong]
        wrong.sort(key=lambda pair: (-pair[1].loss, pair[0]))
        rows = [self._wrong_row(done, *pair) for pair in wrong[:SHOWN]]
        self._write("a", "".join(f"{json.dumps(asdict(row))}\n" for row in rows))
        total = trainer.total_steps
        logger.info("step %d/%d  %s", done, total, _headline(len(wrong), judged))

    def _wrong_row(self, done: int, row: int, found: Judged) -> WrongRow:
        decode = self._decode or as_numbers
        text = self._trainer.job.validation.readable(row, decode)
        names = found.label, found.prediction
        return WrongRow(done, row, text, *names, found.score, found.loss)

    def _write(self, mode: str, text: str) -> None:
        """Write the file; a full disk does not end the run."""
        try:
            with self._path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            logger.warning("%s cannot be written now: %s", self._path, error)


def _headline(wrong: int, judged: list[tuple[int, Judged]]) -> str:
    if all(found.score is None for _, found in judged):
        return f"the largest errors of {len(judged)} validation rows: {FILE_NAME}"
    return f"{wrong} of {len(judged)} validation rows predicted wrong: {FILE_NAME}"


def _lines_until(step: int, text: str) -> Iterator[str]:
    for line in text.splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step:
                yield line
        except (ValueError, KeyError, TypeError):
            continue  # a line that a kill truncated


@torch.no_grad()
def _judge(trainer: Trainer, done: int) -> list[tuple[int, Judged]]:
    """Return each row of a sample by its number. A row may be longer than all rows of
    the training, like in evaluations."""
    job, runtime = trainer.job, trainer.runtime
    budget = evaluation_budget(trainer, job.validation)
    resolved = replace(trainer.resolved, token_budget=budget)
    planner = replace(make_planner(job.settings, runtime, resolved), world_size=1)
    collator = make_collator(job, runtime, resolved, trainer.model.model.config)
    rows, ids = job.validation.sequences(_sample(job, done))
    found: list[tuple[int, Judged]] = []
    # Graphs of the training step do not fit here.
    with evaluating(trainer.model), torch.compiler.set_stance("force_eager"):
        for own in planner.plan(rows.lengths(ids)).micro_batches[0]:
            heartbeat.beat()
            batch = collator.collate(rows, ids[own], EVALUATION_EPOCH)
            tensors = {n: t.to(runtime.device) for n, t in batch.tensors().items()}
            with runtime.autocast():
                logits = trainer.model.logits(tensors).float()[: len(own)]
            judged = job.task.judge(logits, tensors["labels"][: len(own)], as_numbers)
            found += zip(ids[own].tolist(), judged, strict=True)
    return found


def _sample(job: TrainJob, done: int) -> Ints:
    chance = np.random.default_rng([job.settings.runtime.seed, done])
    count = min(len(job.validation), SAMPLED_ROWS)
    return np.sort(chance.choice(len(job.validation), count, replace=False))
