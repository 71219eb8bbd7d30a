"""Find rows that a transformers model cannot process, before the first training step.

Classifiers such as BART's use the state of a text at its end token. A text that
contains a literal `</s>` has two end tokens, and transformers fails during a step.
Model types without a family in flatout run on padded rows. For some of them, outputs
depend on the padding. This is detected by running rows with and without padding.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.engine.families import family_of, packable
from flatout.engine.families._family import Family
from flatout.engine.models.building import ModelError
from flatout.engine.parameters.faults import first_line
from flatout.engine.rows.rows import SplitRows
from flatout.engine.tasks import Task, has_custom_head
from flatout.engine.tokenizing.tokenizer_checks import usable_positions

ROWS_AT_ONCE = 2**14
PROBED = (3, 6, 14)
"""Lengths of the test rows, which are run one by one and then as one padded batch."""
TOLERANCE = 1e-4
"""The tolerated difference relative to the largest output (10 x fp32 rounding)."""


def end_faults(model: Any, rows: SplitRows) -> dict[int, str]:
    """Return a message for each row number with an unusual number of end tokens. The
    usual number is the smallest number in any row, but at least one."""
    end = getattr(model.config, "eos_token_id", None)
    if end is None or not _reads_ends(model):
        return {}
    counts = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = np.arange(start, min(start + ROWS_AT_ONCE, len(rows)))
        counts += [np.count_nonzero(view == end) for view in rows.views(part)]
    usual = max(1, min(counts))
    return {
        row: f"{count} end tokens (number {end}) instead of {usual}: the model "
        "reads its answer at the end"
        for row, count in enumerate(counts)
        if count != usual
    }


def check_ends(model: Any, splits: dict[str, SplitRows]) -> None:
    """Raise ModelError if a row has an unusual number of end tokens."""
    for name, rows in splits.items():
        faults = end_faults(model, rows)
        if faults:
            row, fault = next(iter(faults.items()))
            raise ModelError(
                f"{len(faults)} rows of {name}_tokens cannot be read; the first is row "
                f"{row}: {fault}. Remove this token (for example </s>) from "
                "the texts, or use a model that reads another token"
            )


def _reads_ends(model: Any) -> bool:
    """Return whether the model uses the states at end tokens. This is detected from the
    name of a variable in transformers' code."""
    forward = inspect.unwrap(type(model).forward)
    return "eos_mask" in forward.__code__.co_varnames


def check_padding(model: Any, task: Task) -> None:
    """Raise ModelError if the output for a row changes when the row is padded."""
    kind = model.config.model_type
    reads_tokens = "input_ids" in inspect.signature(model.forward).parameters
    is_empty = next(model.parameters()).is_meta
    if type(family_of(model.config)) is not Family or not reads_tokens or is_empty:
        return  # covered by the family's tests, or nothing to pad or to run
    one_a_row = task.head_kind.one_a_row and not has_custom_head(task)
    if fault := _padding_fault(model, one_a_row=one_a_row):
        raise ModelError(
            f"a model of type {kind} cannot be used, since rows of several lengths are "
            f"padded: {fault}. Use a type that masks padding ({', '.join(packable())} "
            "are tested)"
        )


def _padding_fault(model: Any, *, one_a_row: bool) -> str | None:
    if getattr(model.config, "attention_type", None) == "block_sparse":
        return (
            "attention depends on the longest row of the batch; "
            "model.overrides.attention_type: original_full does not"
        )
    was_training = model.training
    model.eval()
    try:
        most = usable_positions(model.config.to_dict()) or max(PROBED)
        rows = [_probe(model, length) for length in PROBED if length <= most]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            alone = [_outputs(model, [row])[0] for row in rows]
            together = _outputs(model, rows)
        if not one_a_row:
            alone, together = _cut(alone, rows), _cut(together, rows)
        pairs = list(zip(alone, together, strict=True))
        furthest = max(float((one - other).abs().max()) for one, other in pairs)
    except Exception as error:  # every model type fails in its own way
        return f"it cannot read them ({first_line(error)})"
    finally:
        model.train(was_training)
    scale = max(float(one.abs().max()) for one in alone)
    if furthest <= TOLERANCE * scale:
        return None
    return f"padding changes its outputs by {furthest / scale:.0%}"


def _probe(model: Any, length: int) -> list[int]:
    """Return a row of ordinary tokens, with an end token if the model reads it."""
    size = int(model.config.get_text_config().vocab_size)
    row = [size - 1 - (7 * n + length) % max(1, size // 2) for n in range(length)]
    return [*row[:-1], model.config.eos_token_id] if _reads_ends(model) else row


def _outputs(model: Any, rows: list[list[int]]) -> list[Tensor]:
    """Return the logits of each row. Rows are padded on the right."""
    longest = max(map(len, rows))
    padding = getattr(model.config, "pad_token_id", None) or 0
    ids = torch.tensor([row + [padding] * (longest - len(row)) for row in rows])
    places = torch.arange(longest).expand(len(rows), -1)
    mask = (places < torch.tensor([[len(row)] for row in rows])).long()
    found = model(input_ids=ids, attention_mask=mask)
    states = found.logits if "logits" in found else found.last_hidden_state
    return list(states.float())


def _cut(outputs: list[Tensor], rows: list[list[int]]) -> list[Tensor]:
    return [part[: len(row)] for part, row in zip(outputs, rows, strict=True)]
