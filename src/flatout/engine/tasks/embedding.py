"""Text embeddings, learned from pairs of texts.

Each anchor should be closer to its positive than to all other passages of the global
batch (InfoNCE, van den Oord et al. 2018). The loss is the same as
MultipleNegativesRankingLoss of sentence-transformers. For pairs with a score, it is the
same as CosineSimilarityLoss.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.rows.layout import Ints
from flatout.engine.rows.rows import Rows
from flatout.engine.tasks._task import Device, Metrics, Targets, Task, Tensor, Texts


class Embedding(Task):
    """Contrastive loss of the vectors (K, hidden) of K texts, with the labels (K, 3) of
    `Members.labels_of`. Identical texts are not used as negatives of each other."""

    auto_class = "AutoModel"
    architectures = ("Model",)
    texts = Texts(form="pairs")
    whole_batch = True
    label_shape = (3,)
    pipeline_tag = "feature-extraction"
    figures: ClassVar[Mapping[str, bool]] = {
        "loss": False,
        "recall_at_1": True,
        "recall_at_5": True,
        "recall_at_10": True,
        "mrr_at_10": True,
        "ndcg_at_10": True,
        "spearman": True,
    }

    @cached_property
    def pooling(self) -> str:  # type: ignore[override]
        """The pooling mode from the parameters, or from the checkpoint if it is `auto`.
        Raises TaskError if the checkpoint's pooling is unknown or unsupported."""
        from flatout.engine.tasks._shared.checkpoint_pooling import checkpoint_pooling

        settings = self.settings
        if settings.pooling != "auto":
            return settings.pooling
        return checkpoint_pooling(settings.name_or_path, settings.revision)

    def model_fault(self, config: Any) -> str | None:
        width = getattr(config, "hidden_size", None)
        large = [size for size in self.settings.matryoshka if width and size > width]
        if not large:
            return None
        return (
            f"model.matryoshka: the model's vectors have {width} numbers, fewer than "
            f"{large[0]}; remove that size"
        )

    def token_label_type(self) -> Any:
        return pa.float64()

    def targets(
        self, rows: Rows, row_ids: Ints, epoch: int, *, pools_last: bool
    ) -> Targets:
        """Return one target per text, at its last token if `pooling` is `last`."""
        last = self.pooling == "last"
        return super().targets(rows, row_ids, epoch, pools_last=last)

    def num_targets(self, rows: Rows, row_ids: Ints, epoch: int) -> int:
        """Return the number of anchors, because the loss is summed over anchors."""
        return int((rows.labels_of(row_ids)[:, 1] == 0).sum())

    def head(self, model: Any, states: Tensor) -> Tensor:
        """Return the hidden states in fp32 as logits."""
        return states.float()

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, summed over anchors and sizes in `model.matryoshka`."""
        import torch

        sizes = self.settings.matryoshka or [logits.shape[1]]
        with torch.autocast(logits.device.type, enabled=False):
            found = [self._loss(logits[:, :size].float(), labels) for size in sizes]
        return torch.stack(found).sum()

    def _loss(self, vectors: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of vectors (K, size), summed over anchors. All pairs of texts
        are compared and then masked, which avoids device synchronisation."""
        import torch
        from torch.nn.functional import normalize

        vectors = normalize(vectors, dim=1)
        scored = _scored(vectors, labels)
        scores = vectors @ vectors.T / self.settings.temperature
        sample, place, text = labels.unbind(1)
        together = sample[:, None] == sample
        positive, is_known = _first(together & (place == 1))
        anchor, _ = _first(together & (place == 0))
        own = positive[:, None] == torch.arange(len(labels), device=labels.device)
        repeats = (text == text[:, None]) | (text == text[positive][:, None])
        repeats |= (text[anchor] == text[:, None]) & (place == 1)
        compared = (place > 0) & (own | ~repeats)
        # Use the lowest finite number, because -inf would give rows without a passage
        # NaN gradients.
        lowest = torch.finfo(scores.dtype).min
        total = scores.masked_fill(~compared, lowest).logsumexp(1)
        losses = total - scores.gather(1, positive[:, None]).squeeze(1)
        return losses.where((place == 0) & is_known, 0.0).sum() + scored

    def real(self, labels: Tensor) -> Tensor:
        return labels[:, 1] == 0

    def metrics(self, device: Device) -> Metrics:
        from flatout.engine.tasks._shared.ranking import Retrieval

        return Retrieval(self.settings.matryoshka)

    def answer_fields(self) -> list[Any]:
        """Return a field for the vector of a text, which has unit length."""
        return [pa.field("vector", pa.list_(pa.float32()))]

    def answers(self, logits: npt.NDArray[np.float32]) -> Mapping[str, Any]:
        lengths = np.linalg.norm(logits, axis=1, keepdims=True)
        return {"vector": list(logits / np.maximum(lengths, 1e-12))}


def _scored(vectors: Tensor, labels: Tensor) -> Tensor:
    """Return the summed squared errors of the cosine similarities of scored pairs."""
    import torch

    sample, place, bits = labels.unbind(1)
    second, has_score = _first((sample[:, None] == sample) & (place == -1))
    cosines = (vectors * vectors[second]).sum(1)
    scores = bits.to(torch.int32).view(torch.float32)
    # Mask before squaring. Some values are bits of a hash, which may be NaN and would
    # make the gradient NaN.
    errors = (cosines - scores).where((place == 0) & has_score, 0.0)
    return errors.square().sum()


def _first(found: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the first true column in each row of the boolean matrix
    `found` (K, K), and whether the row has one. Both are tensors (K,)."""
    most, at = found.int().max(1)
    return at, most > 0
