"""Base classes of tasks. A task defines labels, target positions, loss and metrics.

Methods import torch only when they need it. The `split` pipeline uses the labels of a
task without loading torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.parameters import ModelSettings
from flatout.engine.rows.layout import Ints
from flatout.engine.rows.rows import Rows
from flatout.engine.rows.vocabulary import Vocabulary

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor
    Device = torch.device
else:  # the `split` pipeline uses tasks without torch
    Tensor = Device = Any

IGNORED = -100
"""The label of a position without a target, as in PyTorch."""


class TaskError(ValueError):
    """Raised if a task does not fit the rows, tokenizer or model."""


class HeadKind(Enum):
    """The kind of a model's head. Each model family maps these kinds to its heads."""

    ROW = "one state a row"
    TOKEN = "the states of tokens"
    VOCABULARY = "the states of tokens, for scores of all pieces"
    DIRECTIONS = "two states a token, from the left and from the right, for the same"
    WHOLE = "no separate part: the whole model runs"

    @property
    def one_a_row(self) -> bool:
        """Whether each row has exactly one target."""
        return self in (HeadKind.ROW, HeadKind.WHOLE)


@dataclass(frozen=True)
class Texts:
    """Properties of the texts on which a task trains."""

    form: str = "text"
    """The form of a row: `text`, `words` (each with a label), `pairs` (two texts) or
    `ranking` (a query, a passage and a score)."""
    completions: bool = False
    """Whether rows may be completions of prompts, or chat messages."""
    causal: bool = False
    """Whether a token may attend only to earlier tokens."""
    predicts_neighbours: bool = False
    """Whether the end of a text is predicted. Truncated texts then get no end token."""
    joined: bool = False
    """Whether texts may be concatenated to fill rows (`tokenize.join_texts`)."""
    whole_words: bool = False
    """Whether each space-separated word is one token of a tokenizer that is trained."""


@dataclass(frozen=True)
class Targets:
    """The targets of B rows. Row r has K_r targets."""

    places: Sequence[Ints]
    """The positions (K_r,) of the targets in each row."""
    labels: Sequence[npt.NDArray[Any]]
    """The labels (K_r, ...) at these positions."""
    values: Sequence[Any] | None = None
    """The rows to train on, such as masked copies, or None for the rows themselves."""
    fields: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Further fields (B, ...) of the micro-batch, such as random crops of images."""


@dataclass(frozen=True)
class LossOptions:
    """Options of a classification loss in training. Evaluations ignore them."""

    class_weights: tuple[float, ...] | None = None
    """The weight of each class, indexed by class number."""
    label_smoothing: float = 0.0
    """The target probability that is spread over all classes (Szegedy et al. 2016)."""
    focal_gamma: float = 0.0
    """The exponent of (1 - label probability) in the focal loss (Lin et al. 2017)."""


class Metrics(ABC):
    """Metrics that are accumulated on the device and computed once, at the end."""

    @abstractmethod
    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add logits and labels (k, ...) of k targets without device
        synchronisation."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are summed over all ranks."""
        return []

    def kept(self) -> list[list[Tensor]]:
        """Return lists of tensors (k, ...) that cannot be summed. Before `compute`, the
        contents of each list are replaced by the tensors of all ranks."""
        return []

    @abstractmethod
    def compute(self) -> dict[str, Any]:
        """Return the metrics named in `Task.figures`. NaN values are ignored."""


class Task(ABC):
    """Base class of all tasks.

    The defaults are for one label per row and a linear head. Subclasses override
    whatever differs. The results of methods that receive rows may depend only on (seed,
    epoch, row)."""

    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    """The transformers class that builds the model with its head."""
    architectures: ClassVar[tuple[str, ...]] = ("ForSequenceClassification",)
    """The suffixes of the class names of models with such a head."""
    head_kind: ClassVar[HeadKind] = HeadKind.ROW
    """The kind of head. The model family provides the function that computes it."""
    whole_batch: ClassVar[bool] = False
    """Whether the loss compares all samples of a global batch with one another, as
    contrastive losses do. Each sample then has one target. If a step has several
    micro-batches or ranks, logits are computed twice (train/cached_gradients.py).
    Evaluations compare COMPARED_ROWS rows at a time (train/evaluate.py)."""
    pooling: str | None = None
    """How a row's hidden states are combined into one vector: mean, first, last, or
    None for the default of the model family."""
    label_type: ClassVar[Any] = None
    """The Arrow type of a label in the output of `split`: string for a class name,
    float64 for a number, list(...) for several labels, None for rows without labels."""
    texts: ClassVar[Texts] = Texts()
    label_dtype: ClassVar[Any] = np.dtype(np.int64)
    """The dtype of labels in a batch. Padding has the label IGNORED, or NaN for float
    dtypes."""
    label_shape: ClassVar[tuple[int, ...]] = ()
    """The shape of the label of one target."""
    takes_options: ClassVar[frozenset[str]] = frozenset()
    """The names of the `LossOptions` fields that the task supports."""
    targets_per_token: float = 0.0
    """The number of targets per token, used to estimate the memory of logits."""
    loss_options: LossOptions = LossOptions()
    """The options of the training loss in this run."""
    figures: ClassVar[Mapping[str, bool]] = {"loss": False}
    """The names of the metrics, mapped to whether higher values are better.
    `perplexity` is computed as the exponential of the mean loss."""
    pipeline_tag: ClassVar[str] = "text-classification"
    """The task's name on the Hugging Face Hub and in MLflow."""

    def __init__(
        self,
        settings: ModelSettings,
        label_names: Sequence[str] = (),
        vocabulary: Vocabulary | None = None,
        seed: int = 0,
    ) -> None:
        self.settings = settings
        self.label_names = tuple(label_names)
        self.vocabulary = vocabulary
        self.seed = seed

    # Rows and models.

    def token_label_type(self) -> Any:
        """Return the Arrow type of the column `labels` of token rows."""
        return pa.int64()

    def label_fault(self, labels: Any) -> str | None:
        """Return why labels of a split, an Arrow column of `label_type`, are invalid,
        or None. By default, every class name must also occur in the train split."""
        from flatout.engine.tasks._labels import unknown_label

        return unknown_label(labels, self.label_names) if self.label_names else None

    def encode_labels(self, labels: Any) -> Any:
        """Convert an Arrow array of `label_type` to labels of token rows."""
        return labels.cast(self.token_label_type())

    def config_keys(self) -> dict[str, Any]:
        """Return the config entries that the model needs, such as the class names."""
        return {}

    def model_fault(self, config: Any) -> str | None:
        """Return why a model with this config cannot be used, or None if it can."""
        return None

    def tokenizer_fault(self, tokenizer: Any) -> str | None:
        """Return why this transformers tokenizer cannot be used, or None if it can."""
        return None

    # Targets, on the host.

    def targets(
        self, rows: Rows, row_ids: Ints, epoch: int, *, pools_last: bool
    ) -> Targets:
        """Return the targets of the rows `row_ids` (B,). If `pools_last` is true, the
        target of a row is at its last token instead of its first token."""
        ends = rows.lengths(row_ids) - 1 if pools_last else np.zeros_like(row_ids)
        labels = rows.labels_of(row_ids)
        return Targets(list(ends.reshape(-1, 1)), list(labels[:, None]))

    def num_targets(self, rows: Rows, row_ids: Ints, epoch: int) -> int:
        """Return the number of targets in the global batch `row_ids` (N,)."""
        return len(row_ids)

    def divisor(self, rows: Rows, row_ids: Ints, epoch: int) -> float | None:
        """Return the number by which the summed loss of a global batch is divided, e.g.
        the sum of target weights. None stands for the number of targets."""
        return None

    # Logits, loss and metrics, on the device.

    def head(self, model: Any, states: Tensor) -> Tensor:
        """Return the logits (K, ...) of K targets from their last hidden states (K,
        hidden). Override this method for a custom head. Otherwise, the head of the
        model family for `head_kind` is used."""
        raise NotImplementedError

    @abstractmethod
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the fp32 loss, summed over K targets. Both arguments are (K, ...)."""

    def hits(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the number of correct predictions and the number of targets as scalar
        tensors, or None if predictions of this task are not simply right or wrong."""
        return None

    def metrics(self, device: Device) -> Metrics | None:
        """Return new metrics for one evaluation, or None to report only the loss."""
        return None

    def real(self, labels: Tensor) -> Tensor:
        """Return a boolean mask (K,) of the labels (K, ...) that belong to real
        targets, not to padding. If each element is a target, the mask has the shape of
        the labels."""
        flat = labels.flatten(1)[:, 0] if labels.dim() > 1 else labels
        return ~flat.isnan() if flat.is_floating_point() else flat != IGNORED

    def chance_loss(self, num_outputs: int) -> float | None:
        """Return the mean loss of random guesses, or None if it depends on the data."""
        return None

    # Readable results.

    def judge(self, logits: Tensor, labels: Tensor) -> dict[str, Any]:
        """Return columns that show K predictions in readable form: `loss`, `label`,
        `prediction`, `wrong` and, if available, `score` (the probability of the
        prediction). Return an empty dict if predictions are not simply right or wrong.
        The inputs have the shape (K, ...)."""
        return {}

    def answer_fields(self) -> list[Any]:
        """Return the Arrow fields of a row's prediction, or [] if there is none."""
        return []

    def answers(self, logits: npt.NDArray[np.float32]) -> Mapping[str, Any]:
        """Return the columns of `answer_fields` for the outputs (N, ...) of N rows."""
        return {}

    def target_outputs(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Reduce the logits of K targets to the outputs (K, ...) that prediction needs,
        on the device, because the logits of all targets may not fit in memory."""
        return logits

    def row_answers(
        self, logits: npt.NDArray[np.float32], rows: Any
    ) -> Mapping[str, Any]:
        """Return the columns of `answer_fields` for `rows`. `logits` (K, ...) are the
        results of `target_outputs` for all targets of these rows, in order."""
        return self.answers(logits)


class RankedRows(ABC):
    """Mixin for tasks whose metrics compare rows with the same query."""

    @abstractmethod
    def encode_ranked(self, labels: Any, queries: npt.NDArray[Any]) -> Any:
        """Return the labels of N token rows as an Arrow array, from an Arrow array of
        original `labels` and the query number of each row, `queries` (N,)."""


def ignored_label(dtype: Any) -> float:
    """Return the label of padding for labels of this dtype: NaN or IGNORED."""
    return float("nan") if np.issubdtype(dtype, np.floating) else IGNORED


def has_custom_head(task: Task) -> bool:
    """Return whether the task overrides the method `head`."""
    return type(task).head is not Task.head


def without_options(task: Task) -> Task:
    """Return a copy of the task without loss options. Evaluations use it so that losses
    can be compared between runs."""
    plain = copy(task)
    plain.loss_options = LossOptions()
    return plain
