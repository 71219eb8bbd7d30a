"""Compare a saved model's predictions with those of plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.engine.answers.plain import Plain, roundoff_of
from flatout.engine.answers.verdict import Verdict, compared, tolerances, wrong
from flatout.engine.models.building import ModelError, load_pretrained
from flatout.engine.parameters import Settings
from flatout.engine.predict.checks import check_tokens, task_of, vocabulary_of
from flatout.engine.predict.predictor import Predictor
from flatout.engine.rows.rows import rows_from_dataset
from flatout.engine.tasks import without_options
from flatout.engine.tokenizing.tokenizer import TokenizerFile

ROWS = 200


def verify_model(folder: Path, tokens: Any, settings: Settings) -> Verdict:
    """Compare the predictions of the saved model in `folder` with those of plain
    transformers, on the first ROWS rows of the `datasets.Dataset` `tokens`. The losses
    are compared, and the outputs too if there is one per row. Raises ModelError if
    `folder` contains no model, or if the model cannot process the rows."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"--model: {folder} has no config.json: name a saved model")
    trusted = settings.model.trust_remote_code
    own, plain = (load_pretrained(folder, trust_remote_code=trusted) for _ in range(2))
    reads = (folder / "tokenizer.json").is_file()
    tokenizer = TokenizerFile(folder) if reads else None
    check_tokens(tokens, tokenizer)
    rows = rows_from_dataset(tokens.select(range(min(ROWS, len(tokens)))))
    task = task_of(own, settings.model, vocabulary_of(tokenizer))
    predictor = Predictor(own, tokenizer, settings, task)
    runtime, loss = predictor.runtime, predictor.evaluate(rows).loss
    module, plain_task = plain.to(runtime.device).eval(), without_options(task)
    reference = Plain(module, plain_task, rows, predictor.max_length)
    both = reference.in_both_precisions(runtime, lambda: _outputs(reference))
    (theirs, answers), (rounded, near) = both
    for_loss, for_outputs = tolerances(roundoff_of(runtime))
    checks = [compared("loss", [(loss, theirs, rounded)], for_loss)]
    if task.head_kind.one_a_row:
        found, mean = torch.from_numpy(predictor.logits(rows)), answers.mean()
        values = found - mean, answers - mean, near - mean
        checks.append(compared("outputs", [values], for_outputs))
    step = (
        f"{len(rows)} rows of the test split by {folder} on {runtime.device_name}, "
        f"{runtime.precision}, {predictor.strategy}"
    )
    return Verdict(step, reference.described, checks, wrong(checks))


@torch.no_grad()
def _outputs(plain: Plain) -> tuple[float, Tensor]:
    """Return the mean loss, and the outputs (rows, ...) if there is one per row. The
    logits of all tokens may not fit in memory."""
    loss, targets, outputs, ids = 0.0, 0, [], []
    kept = None if plain.task.head_kind.one_a_row else 0
    for part in plain.parts(np.arange(len(plain.rows))):
        loss, targets = loss + part.loss.item(), targets + part.targets
        outputs.append(part.logits[:kept].float().cpu())
        ids.append(part.row_ids[:kept])
    order = np.concatenate(ids).argsort()
    return loss / max(1, targets), torch.cat(outputs)[order]
