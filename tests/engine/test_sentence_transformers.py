"""Losses, folders and negatives compared with those of sentence-transformers."""

from __future__ import annotations

import pytest
import torch

from flatout.engine.parameters import ModelSettings
from flatout.engine.tasks import make_task

pytest.importorskip("sentence_transformers")


def test_the_loss_of_scored_pairs_is_that_of_cosine_similarity():
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss

    torch.manual_seed(1)
    vectors, scores = torch.randn(12, 2, 16), torch.linspace(-1, 1, 12)
    bits = scores.view(torch.int32).long().repeat_interleave(2)
    numbers = torch.arange(12).repeat_interleave(2)
    labels = torch.stack([numbers, torch.tensor([0, -1] * 12), bits], 1)
    model = ModelSettings(task="embedding", config={"model_type": "bert"})
    theirs = CosineSimilarityLoss(torch.nn.Identity())
    for sizes in ([], [16, 4]):
        task = make_task(model.model_copy(update={"matryoshka": sizes}))
        expected = sum(
            theirs.compute_loss_from_embeddings(
                [*vectors[..., :size].unbind(1)], scores
            )
            for size in sizes or [16]
        )
        found = task.loss(vectors.flatten(0, 1), labels) / 12
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
