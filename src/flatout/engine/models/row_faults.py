"""What models of transformers cannot read, found before a step of training.

Classifiers like BART's read a text's state at its end token: a literal `</s>` gives it
two, which transformers refuses in the midst of a step. Types without a family of ours
run padded, and some mix the padding into their answers: two rows show it.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.engine.families import family_of, packable, usable_positions
from flatout.engine.families._family import Family
from flatout.engine.models.building import ModelError
from flatout.engine.parameters.faults import first_line
from flatout.engine.rows.rows import SplitRows
from flatout.engine.tasks import Task

ROWS_AT_ONCE = 2**14
PROBED = (3, 6, 14)
"""Tokens of rows that are read alone and together."""
TOLERANCE = 1e-4
"""Of the largest output; rounding in fp32 is a tenth of it."""


def end_faults(model: Any, rows: SplitRows) -> dict[int, str]:
    """Number of a row -> why the model cannot read it: the first rows alone of those
    that are looked at together."""
    end = getattr(model.config, "eos_token_id", None)
    if end is None or not _reads_ends(model):
        return {}
    counts = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = np.arange(start, min(start + ROWS_AT_ONCE, len(rows)))
        counts += [np.count_nonzero(view == end) for view in rows.views(part)]
    usual = max(1, min(counts))
    return {
        row: f"{count} end tokens (number {end}), where a text has {usual}: the model "
        "reads its answer at the end"
        for row, count in enumerate(counts)
        if count != usual
    }


def check_ends(model: Any, splits: dict[str, SplitRows]) -> None:
    """Raises ModelError that names the first row of each split."""
    for name, rows in splits.items():
        faults = end_faults(model, rows)
        if faults:
            row, fault = next(iter(faults.items()))
            raise ModelError(
                f"{len(faults)} rows of {name}_tokens cannot be read, the first is row "
                f"{row}: {fault}. Take what the tokenizer spells so (</s>, say) out of "
                "the texts, or take a model that reads another token"
            )


def _reads_ends(model: Any) -> bool:
    """By the name that transformers' own code has for the places of ends."""
    forward = inspect.unwrap(type(model).forward)
    return "eos_mask" in forward.__code__.co_varnames


def check_padding(model: Any, task: Task) -> None:
    """Raises ModelError if a row gets another answer beside a longer one."""
    kind = model.config.model_type
    if type(family_of(model.config)) is not Family or not _reads_tokens(model):
        return  # tested, or one shape for all
    if fault := _padding_fault(model, one_a_row=task.head_kind.one_a_row):
        raise ModelError(
            f"a model of type {kind} does not serve, since rows of several lengths are "
            f"padded: {fault}. Take a type that masks padding ({', '.join(packable())} "
            "are tested)"
        )


def _padding_fault(model: Any, *, one_a_row: bool) -> str | None:
    if getattr(model.config, "attention_type", None) == "block_sparse":
        return (
            "what a token sees depends on the longest row beside it; "
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
    except Exception as error:  # each type fails in its own way
        return f"it cannot read them ({first_line(error)})"
    finally:
        model.train(was_training)
    scale = max(float(one.abs().max()) for one in alone)
    if furthest <= TOLERANCE * scale:
        return None
    return f"its answers are others then, by {furthest / scale:.0%}"


def _probe(model: Any, length: int) -> list[int]:
    """Tokens that are mostly no special ones, and an end if the model reads it."""
    size = int(model.config.get_text_config().vocab_size)
    row = [size - 1 - (7 * n + length) % max(1, size // 2) for n in range(length)]
    return [*row[:-1], model.config.eos_token_id] if _reads_ends(model) else row


def _outputs(model: Any, rows: list[list[int]]) -> list[Tensor]:
    """Logits of each row, padded on the right."""
    longest = max(map(len, rows))
    padding = getattr(model.config, "pad_token_id", None) or 0
    ids = torch.tensor([row + [padding] * (longest - len(row)) for row in rows])
    places = torch.arange(longest).expand(len(rows), -1)
    mask = (places < torch.tensor([[len(row)] for row in rows])).long()
    return list(model(input_ids=ids, attention_mask=mask).logits.float())


def _cut(outputs: list[Tensor], rows: list[list[int]]) -> list[Tensor]:
    """Those of real tokens."""
    return [part[: len(row)] for part, row in zip(outputs, rows, strict=True)]


def _reads_tokens(model: Any) -> bool:
    weights = next(model.parameters())
    names = inspect.signature(model.forward).parameters
    return "input_ids" in names and not weights.is_meta
