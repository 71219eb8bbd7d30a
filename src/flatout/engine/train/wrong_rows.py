"""What the model gets wrong: validation rows for people to read while it trains.

A look is a pause, as an evaluation is: its time is in no window, and it draws no random
number of the training's. Sharded weights are gathered by all ranks at once, so all of
them pass the same rows; the main rank tells of them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from flatout.engine.batches.collation import Collator, MicroBatch
from flatout.engine.machine.watchdog import heartbeat
from flatout.engine.rows.layout import Ints, LaidOut
from flatout.engine.rows.rows import Rows
from flatout.engine.tasks import Judged, Task
from flatout.engine.train.evaluate import EVALUATION_EPOCH, evaluating
from flatout.engine.train.keeping.oom import evaluate_within_memory, evaluation_budget
from flatout.engine.train.recording.progress import evaluations
from flatout.engine.train.setup.assemble import Trainer
from flatout.engine.train.setup.step_data import make_collator, make_planner

logger = logging.getLogger(__name__)

FILE_NAME = "wrong_rows.jsonl"
SHOWN = 5
ROWS_OF_ONE_TARGET = 128
ROWS_OF_MANY_TARGETS = 8
TARGETS_AT_ONCE = 256
"""Of a language model's micro-batch: bounds the memory that logits take."""
CONTEXT_TOKENS = 32
"""Shown before a language model's target."""
LINE_CHARACTERS = 100


@dataclass(frozen=True)
class WrongRow:
    """A line of the file."""

    step: int
    row: int
    """Number of the row in validation_tokens."""
    text: str
    """Of the row; for a language model what it is predicted from."""
    label: str | float
    prediction: str | float
    score: float | None
    """Probability of the prediction, where it has one."""
    loss: float
    side: str | None = None
    """Of a language model's target, on which the text stands: left, right."""


@dataclass(frozen=True)
class _Target:
    """What the model says of one target."""

    row: int
    judged: Judged
    text: str
    """What people know it by."""
    side: str | None
    """Of the target, on which the text stands."""


class WrongRows:
    """Looks for wrong rows every `train.error_analysis_every` steps and at the end."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._task = trainer.job.task
        self._every = trainer.job.settings.train.error_analysis_every
        self._path = trainer.job.metrics_file.with_name(FILE_NAME)
        self._is_main = trainer.runtime.ranks.is_main

    def start(self, start_step: int) -> None:
        """A new run begins without lines; a resumed one keeps those before it."""
        if self._is_main and self._path.is_file():
            known = self._path.read_text(encoding="utf-8", errors="replace")
            self._write("w", "".join(_lines_until(start_step, known)))

    def due(self, done: int) -> bool:
        if self._every is None:
            return False
        return evaluations(done - 1, done, self._trainer.total_steps, self._every) == 1

    def look(self, done: int) -> None:
        """Log and write the worst of a sample that seed and step decide."""
        trainer, split = self._trainer, self._trainer.job.validation
        targets = evaluate_within_memory(trainer, split, lambda: _judge(trainer, done))
        if not self._is_main:
            return
        wrong = [target for target in targets if target.judged.wrong]
        wrong.sort(key=lambda target: (-target.judged.loss, target.row))
        rows = [_wrong_row(target, done) for target in wrong[:SHOWN]]
        self._write("a", "".join(f"{json.dumps(asdict(row))}\n" for row in rows))
        head = self._headline(len(wrong), targets)
        lines = [line_of(row) for row in rows]
        total = trainer.total_steps
        logger.info("%s", "\n".join([f"step {done}/{total}  {head}", *lines]))

    def _headline(self, wrong: int, targets: Sequence[_Target]) -> str:
        if all(target.judged.score is None for target in targets):
            return f"the largest errors of {len(targets)} validation rows:"
        kind = "validation rows" if self._task.one_a_row else "targets"
        end = ", those of the largest loss:" if wrong else ""
        return f"{wrong} of {len(targets)} {kind} predicted wrong{end}"

    def _write(self, mode: str, text: str) -> None:
        """A full disk costs no run."""
        try:
            with self._path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            logger.warning("%s cannot be written now: %s", self._path, error)


def _wrong_row(target: _Target, done: int) -> WrongRow:
    judged = target.judged
    return WrongRow(
        step=done,
        row=target.row,
        text=target.text,
        label=judged.label,
        prediction=judged.prediction,
        score=judged.score,
        loss=judged.loss,
        side=target.side,
    )


def line_of(row: WrongRow) -> str:
    """`  'neg', predicted 'pos' (93 %): the film was` in one line of the log."""
    label, prediction = (
        f"{value:.4g}" if isinstance(value, float) else f"'{_printable(value)}'"
        for value in (row.label, row.prediction)
    )
    score = "" if row.score is None else f" ({100 * row.score:.0f} %)"
    before = "before " if row.side == "right" else ""
    head = f"  {label}, predicted {prediction}{score}: {before}"
    head = head[: LINE_CHARACTERS // 2 + 10]
    text, room = _printable(row.text), LINE_CHARACTERS - len(head)
    if len(text) > room:
        left = row.side == "left"
        text = f"…{text[1 - room :]}" if left else f"{text[: room - 1]}…"
    return head + text


def _printable(text: str) -> str:
    """One line, without the characters by which a terminal is steered."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _lines_until(step: int, text: str) -> Iterator[str]:
    for line in text.splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step:
                yield line
        except (ValueError, KeyError, TypeError):
            continue  # a line that a kill has cut short


def _decoder(trainer: Trainer) -> Callable[[Ints], str]:
    """Tokens as text; as their numbers where no tokenizer is known."""
    if trainer.job.tokenizer_file is None:
        return lambda tokens: " ".join(map(str, tokens.tolist()))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(trainer.job.tokenizer_file)
    # A language model's target may be a special token, and its context has masks.
    hide_special = trainer.job.task.one_a_row
    return lambda tokens: str(tokenizer.decode(tokens.tolist(), hide_special))


@torch.no_grad()
def _judge(trainer: Trainer, done: int) -> list[_Target]:
    """The rows may be longer than all trained on, as those of an evaluation are."""
    job, runtime = trainer.job, trainer.runtime
    budget = evaluation_budget(trainer, job.validation)
    resolved = replace(trainer.resolved, token_budget=budget)
    chance = np.random.default_rng([job.settings.runtime.seed, done])
    sample = _sample(trainer, chance)
    planner = replace(make_planner(job.settings, runtime, resolved), world_size=1)
    collator = make_collator(job, runtime, resolved, trainer.model.model.config)
    rows, ids = job.validation.sequences(sample)
    plan = planner.plan(rows.lengths(ids))
    found: list[_Target] = []
    # Graphs of the training step do not serve here.
    with evaluating(trainer.model), torch.compiler.set_stance("force_eager"):
        for own in plan.micro_batches[0]:
            heartbeat.beat()
            found += _targets(trainer, collator, rows, ids[own], chance)
    return found


def _sample(trainer: Trainer, chance: np.random.Generator) -> Ints:
    rows = trainer.job.validation
    one_target = trainer.job.task.one_a_row
    wanted = ROWS_OF_ONE_TARGET if one_target else ROWS_OF_MANY_TARGETS
    sample: Ints = chance.choice(len(rows), min(len(rows), wanted), replace=False)
    return np.sort(sample)


def _targets(
    trainer: Trainer,
    collator: Collator,
    rows: Rows,
    row_ids: Ints,
    chance: np.random.Generator,
) -> Iterator[_Target]:
    """Of the rows `row_ids` (B,); of a language model some."""
    batch, laid = collator.laid_out(rows, row_ids, EVALUATION_EPOCH)
    _keep_some(batch, collator, chance)
    decode = _decoder(trainer)
    task, judged = collator.task, _judged(trainer, batch, decode)
    ends = laid.starts + rows.lengths(row_ids)
    for number, found in enumerate(judged):
        target = number if found.target is None else found.target
        index = int(batch.target_index[target])
        row = int(np.searchsorted(laid.starts, index, side="right")) - 1
        bounds = int(laid.starts[row]), int(ends[row])
        if task.one_a_row:
            text, side = rows.readable(int(row_ids[row]), decode), None
        else:
            text = decode(_context(laid, bounds, index, task, found))
            side = "right" if found.looks_back else "left"
        yield _Target(rows.place_of(int(row_ids[row]))[0], found, text, side)


def _context(
    laid: LaidOut, bounds: tuple[int, int], index: int, task: Task, judged: Judged
) -> Ints:
    """What is seen, of a row with `bounds` in the batch, of the target at `index`."""
    flat: Ints = laid.fields["input_ids"].ravel()
    start, end = bounds
    if judged.looks_back:
        return flat[index : min(end, index + CONTEXT_TOKENS)]
    stop = index + task.predicts_neighbours
    return flat[max(start, stop - CONTEXT_TOKENS) : stop]


def _keep_some(
    batch: MicroBatch, collator: Collator, chance: np.random.Generator
) -> None:
    """Real targets alone, and not too many."""
    real = collator.task.real(batch.labels)
    places = np.flatnonzero(
        (real.flatten(1).any(1) if real.dim() > 1 else real).numpy()
    )
    if len(places) > TARGETS_AT_ONCE and not collator.task.one_a_row:
        places = np.sort(chance.choice(places, TARGETS_AT_ONCE, replace=False))
    batch.target_index = batch.target_index[places]
    batch.labels = batch.labels[places]


def _judged(
    trainer: Trainer, batch: MicroBatch, decode: Callable[[Ints], str]
) -> list[Judged]:
    """Each target of the batch, on the host."""
    device = trainer.runtime.device
    tensors = {name: t.to(device) for name, t in batch.tensors().items()}
    with trainer.runtime.autocast():
        logits = trainer.model.logits(tensors).float()
    return trainer.job.task.judge(logits, tensors["labels"], decode)
