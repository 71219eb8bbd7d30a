"""Configurations under which a row's result could depend on how rows are batched."""

import numpy as np
import pytest
import torch

from flatout.engine.batches.collation import Collator
from flatout.engine.families import Family, family_of_type
from flatout.engine.models.building import build
from flatout.engine.models.model import TaskModel
from flatout.engine.parameters import ModelSettings, SettingsError
from flatout.engine.rows.layout import Layout
from tests.engine.families import CONFIGS, VOCABULARY, task_of, token_rows

ROPES = {
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 16,
        "rope_theta": 1e4,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
}


def with_rope(kind, max_length):
    positions = 64 if kind == "longrope" else 16
    config = {**CONFIGS["llama"], "max_position_embeddings": positions}
    config |= {"model_type": "llama", "rope_parameters": ROPES[kind]}
    settings = ModelSettings(task="sequence-classification", config=config)
    torch.manual_seed(0)
    return build(settings, task_of("sequence-classification"), VOCABULARY, max_length)


@pytest.mark.parametrize("kind", ROPES)
def test_positions_that_depend_on_the_longest_row_are_refused(kind):
    with pytest.raises(SettingsError, match=r"max_length=17"):
        with_rope(kind, 17)


@pytest.mark.parametrize("kind", ROPES)
def test_shorter_rows_are_those_of_plain_transformers(kind):
    model = with_rope(kind, 16)
    task = task_of("sequence-classification")
    whole = TaskModel(model, task, 16).eval()
    rows = token_rows("sequence-classification")
    ids = np.flatnonzero(rows.all_lengths <= 16)[:4]
    batch = Collator(task, Layout(), pools_last=True).collate(rows, ids, 0)
    with torch.no_grad():
        found = whole.logits(batch.tensors())
        for logits, view in zip(found, rows.views(ids), strict=True):
            alone = model(torch.tensor([view.tolist()])).logits[0]
            torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-5)


def test_a_persons_family_for_a_known_type_wins(monkeypatch):
    monkeypatch.setattr(Family, "known", [*Family.known])
    before = type(family_of_type("bert")).__name__

    class Mine(Family):
        model_types = frozenset({"bert"})

    assert before == "Bert"
    assert type(family_of_type("bert")) is Mine
    Family.known.insert(0, Family.known.pop())  # imported before flatout's own
    assert type(family_of_type("bert")) is Mine
    assert type(family_of_type("roberta")).__name__ == "Roberta"
