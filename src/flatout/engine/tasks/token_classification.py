"""Token classification, such as named-entity recognition: one tag for each word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flatout.engine.rows.layout import Ints
from flatout.engine.rows.rows import Rows
from flatout.engine.tasks._labels import named_labels
from flatout.engine.tasks._shared.cross_entropy import CrossEntropy
from flatout.engine.tasks._task import Device, HeadKind, Metrics, Targets, Tensor, Texts


class TokenClassification(CrossEntropy):
    """Cross entropy at the first token of each word. Labels have the shape (K, 2). The
    first column is the tag. The second column is 1 at the first target of a row, else
    0, so that no entity continues in the next row."""

    auto_class = "AutoModelForTokenClassification"
    architectures = ("ForTokenClassification",)
    head_kind = HeadKind.TOKEN
    texts = Texts(form="words")
    label_type = pa.list_(pa.string())
    label_shape = (2,)
    takes_options = CrossEntropy.takes_options | {"class_weights"}
    figures: ClassVar[Mapping[str, bool]] = {"loss": False} | dict.fromkeys(
        ("accuracy", "f1", "precision", "recall", "f1_macro"), True
    )
    pipeline_tag = "token-classification"
    targets_per_token = 1.0

    def token_label_type(self) -> Any:
        """Return a list type with one tag number per token. The tag number is IGNORED
        for all tokens of a word except the first."""
        return pa.list_(pa.int32())

    def encode_labels(self, labels: Any) -> Any:
        """Convert lists of tag names, one per word, to lists of tag numbers."""
        lists = labels.combine_chunks()
        tags = pc.index_in(lists.values, pa.array(self.label_names, pa.string()))
        found = pa.ListArray.from_arrays(lists.offsets, tags.cast(pa.int32()))
        return pa.chunked_array([found])

    def config_keys(self) -> dict[str, Any]:
        return named_labels(self.label_names)

    def targets(
        self, rows: Rows, row_ids: Ints, epoch: int, *, pools_last: bool
    ) -> Targets:
        """Return one target for each word, at its first token."""
        views = rows.views(row_ids, "labels")
        places = [np.flatnonzero(view >= 0) for view in views]
        tags = [view[own] for view, own in zip(views, places, strict=True)]
        labels = [np.stack([own, np.arange(len(own)) == 0], 1) for own in tags]
        return Targets(places, labels)

    def num_targets(self, rows: Rows, row_ids: Ints, epoch: int) -> int:
        views = rows.views(row_ids, "labels")
        return sum(int((view >= 0).sum()) for view in views)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels[:, 0])

    def hits(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        return super().hits(logits, labels[:, 0])

    def metrics(self, device: Device) -> Metrics:
        """Return metrics of tag accuracy. If all tags have prefixes such as B- and I-,
        the metrics include the F1 of entities."""
        from flatout.engine.tasks._shared.several_labels import Entities

        return Entities(self.label_names, device)

    def answer_fields(self) -> list[Any]:
        """Return fields for the tags of the words and their probabilities. Both are
        null for words beyond the maximum length."""
        return [
            pa.field("tags", pa.list_(pa.string())),
            pa.field("scores", pa.list_(pa.float32())),
        ]

    def row_answers(
        self, logits: npt.NDArray[np.float32], rows: Any
    ) -> Mapping[str, Any]:
        """Return the tags and scores of words from the logits (K, C) of all targets in
        `rows`. Here, the labels of `rows` are the word numbers of the targets."""
        from scipy.special import softmax

        best, scores = logits.argmax(-1), softmax(logits, axis=-1).max(-1)
        targets = zip(best.tolist(), scores.tolist(), strict=True)
        counts = rows.table.column("num_words").to_pylist()
        tags: list[list[str | None]] = [[None] * count for count in counts]
        shares: list[list[float | None]] = [[None] * count for count in counts]
        for row, view in enumerate(rows.views(np.arange(len(rows)), "labels")):
            for word in view[view >= 0].tolist():
                tag, shares[row][word] = next(targets)
                tags[row][word] = self.label_names[tag]
        return {"tags": tags, "scores": shares}
