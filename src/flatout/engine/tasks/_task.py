"""Definition of a task: labels of rows, places of targets, loss and metrics.

Torch is imported inside the methods that compute with it: `split` uses a task's labels
and never loads torch.
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
else:  # `split` uses tasks without torch
    Tensor = Device = Any

IGNORED = -100
"""Label of a place without a target (PyTorch's convention)."""


class TaskError(ValueError):
    """A task that does not fit rows, tokenizer or model; the text has the remedy."""


class HeadKind(Enum):
    """Input of a model's head; families map kinds to heads."""

    ROW = "one state a row"
    TOKEN = "the states of tokens"
    VOCABULARY = "the states of tokens, for scores of all pieces"
    DIRECTIONS = "two states a token, from the left and from the right, for the same"
    WHOLE = "no separate part: the whole model runs"

    @property
    def one_a_row(self) -> bool:
        """True if each row has one target."""
        return self in (HeadKind.ROW, HeadKind.WHOLE)


@dataclass(frozen=True)
class Texts:
    """Properties of a task's texts."""

    form: str = "text"
    """Form of a row: `text`; `words` with a label each; `pairs` of texts; `ranking`:
    a query, a passage and a score."""
    completions: bool = False
    """True if rows may be completions of prompts, or messages."""
    causal: bool = False
    """True if a token may only see those before it."""
    predicts_neighbours: bool = False
    """True if the end of a text is a target: a text that is cut has no end."""
    joined: bool = False
    """True if texts may be joined to full rows (`tokenize.join_texts`)."""
    whole_words: bool = False
    """True if a tokenizer trained here uses each word between spaces as one piece."""


@dataclass(frozen=True)
class Targets:
    """Targets of B rows, K_r in row r."""

    places: Sequence[Ints]
    """Places (K_r,) of the targets in each row."""
    labels: Sequence[npt.NDArray[Any]]
    """Labels (K_r, ...) at these places."""
    values: Sequence[Any] | None = None
    """Changed rows, such as masked ones, to train on; None: the rows are unchanged."""
    fields: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Further fields (B, ...) of the micro-batch, such as random crops of samples."""


@dataclass(frozen=True)
class LossOptions:
    """Options of a classification loss in training; evaluations use the plain loss."""

    class_weights: tuple[float, ...] | None = None
    """Weight of each class, by its number."""
    label_smoothing: float = 0.0
    """Share of each target that is spread over all classes (Szegedy et al. 2016)."""
    focal_gamma: float = 0.0
    """Exponent of (1 - probability of the target) in focal loss (Lin et al. 2017)."""


class Metrics(ABC):
    """Metrics of a split's targets, on the device; read once, at the end."""

    @abstractmethod
    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add (k, ...) targets without waiting for the device."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are summed over ranks."""
        return []

    def kept(self) -> list[list[Tensor]]:
        """Return parts (k, ...) of data that is needed whole; each list is replaced by
        the parts of all ranks."""
        return []

    @abstractmethod
    def compute(self) -> dict[str, Any]:
        """Return figures by name, those of `Task.figures`; a NaN is left out."""


class Task(ABC):
    """A task of a run; a custom class overrides the members that differ.

    The defaults are for one label per row and a linear head, whose logits `loss`
    compares with it. Methods on rows are pure functions of (seed, epoch, row).
    """

    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    """Class of transformers that builds the model with its head."""
    architectures: ClassVar[tuple[str, ...]] = ("ForSequenceClassification",)
    """Suffix of the class names of such models."""
    head_kind: ClassVar[HeadKind] = HeadKind.ROW
    """Input of the head, and which of its family's heads a model has."""
    whole_batch: ClassVar[bool] = False
    """True if the loss compares the samples of a global batch with one another, like
    contrastive losses, with one target each. If a step has several micro-batches or
    ranks, logits are computed twice (train/cached_gradients.py). Evaluations compare
    COMPARED_ROWS rows at a time (train/evaluate.py)."""
    pooling: str | None = None
    """Pooling of the states of a row's tokens to its vector: mean, first or last; None:
    the default of the model's family."""
    label_type: ClassVar[Any] = None
    """Arrow type of a label in the output of split; None: rows have no labels. string:
    the name of a class; float64: a number; list(...): several."""
    texts: ClassVar[Texts] = Texts()
    label_dtype: ClassVar[Any] = np.dtype(np.int64)
    """Type of labels in a batch. The label of padding is IGNORED, of floats NaN."""
    label_shape: ClassVar[tuple[int, ...]] = ()
    """Shape of one target's label."""
    takes_options: ClassVar[frozenset[str]] = frozenset()
    """Names of the supported fields of `LossOptions`."""
    targets_per_token: float = 0.0
    """Share of tokens whose logits a step stores, for the estimate of memory."""
    loss_options: LossOptions = LossOptions()
    """Loss options of this run."""
    figures: ClassVar[Mapping[str, bool]] = {"loss": False}
    """Figures of an evaluation by name: whether higher is better. `perplexity` is exp
    of the mean loss."""
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
        """Arrow type of `labels` in token rows."""
        return pa.int64()

    def label_fault(self, labels: Any) -> str | None:
        """Return a fault of a split's labels, an Arrow column of `label_type`: for
        tasks with names, labels that no row of train has."""
        from flatout.engine.tasks._labels import unknown_label

        return unknown_label(labels, self.label_names) if self.label_names else None

    def encode_labels(self, labels: Any) -> Any:
        """Convert labels of rows, an Arrow array of `label_type`, to token labels."""
        return labels.cast(self.token_label_type())

    def config_keys(self) -> dict[str, Any]:
        """Return keys of the model's config: classes, their names, the problem type."""
        return {}

    def model_fault(self, config: Any) -> str | None:
        """Return why a model with this config does not fit; None if it does."""
        return None

    def tokenizer_fault(self, tokenizer: Any) -> str | None:
        """Return why a transformers tokenizer does not fit; None if it does."""
        return None

    # Targets, on the host.

    def targets(
        self, rows: Rows, row_ids: Ints, epoch: int, *, pools_last: bool
    ) -> Targets:
        """Return targets of `row_ids` (B,). `pools_last`: a row's state is that of its
        last token, else of its first."""
        ends = rows.lengths(row_ids) - 1 if pools_last else np.zeros_like(row_ids)
        labels = rows.labels_of(row_ids)
        return Targets(list(ends.reshape(-1, 1)), list(labels[:, None]))

    def num_targets(self, rows: Rows, row_ids: Ints, epoch: int) -> int:
        """Return the number of targets of the global batch `row_ids` (N,)."""
        return len(row_ids)

    def divisor(self, rows: Rows, row_ids: Ints, epoch: int) -> float | None:
        """Return the divisor of the global batch's summed loss, for example the sum of
        its targets' weights; None: the number of targets."""
        return None

    # Logits, loss and figures, on the device.

    def head(self, model: Any, states: Tensor) -> Tensor:
        """Return logits (K, ...) of the targets' last hidden states (K, hidden). A task
        that defines this has a custom head; all others use the head of `head_kind`."""
        raise NotImplementedError

    @abstractmethod
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of logits, labels (K, ...) summed over targets, fp32 ()."""

    def hits(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return numbers of right predictions and predictions, () each; else None."""
        return None

    def metrics(self, device: Device) -> Metrics | None:
        """Return metrics for one evaluation; None: only the loss."""
        return None

    def real(self, labels: Tensor) -> Tensor:
        """Return (K,) bool: which labels (K, ...) are targets; (K, ...) if each element
        is a separate target."""
        flat = labels.flatten(1)[:, 0] if labels.dim() > 1 else labels
        return ~flat.isnan() if flat.is_floating_point() else flat != IGNORED

    def chance_loss(self, num_outputs: int) -> float | None:
        """Return the mean loss of a random guess; None if it depends on the data."""
        return None

    # Readable results.

    def judge(self, logits: Tensor, labels: Tensor) -> dict[str, Any]:
        """Return columns for logits, labels (K, ...): `loss`, readable `label` and
        `prediction`, `wrong`, and `score`, the probability of the prediction, if it has
        one. Empty if a single target is not right or wrong."""
        return {}

    def answer_fields(self) -> list[Any]:
        """Arrow fields of a prediction; empty if rows have no answer."""
        return []

    def answers(self, logits: npt.NDArray[np.float32]) -> Mapping[str, Any]:
        """Return columns of `answer_fields` for outputs (N, ...) of N rows."""
        return {}

    def target_outputs(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the part (K, ...) of the logits (K, ...) of some targets that predict
        keeps; on the device, whose memory may be too small for the logits of all."""
        return logits

    def row_answers(
        self, logits: npt.NDArray[np.float32], rows: Any
    ) -> Mapping[str, Any]:
        """Return these columns from the `target_outputs` (K, ...) of all targets of
        `rows`, in order."""
        return self.answers(logits)


class RankedRows(ABC):
    """Second base class of a task whose figures compare the rows of a query."""

    @abstractmethod
    def encode_ranked(self, labels: Any, queries: npt.NDArray[Any]) -> Any:
        """Convert labels (N,), an Arrow array, and numbers (N,) of the rows' queries to
        an Arrow array (N,) of token labels."""


def ignored_label(dtype: Any) -> float:
    """Return the label of padding for a type of targets."""
    return float("nan") if np.issubdtype(dtype, np.floating) else IGNORED


def has_custom_head(task: Task) -> bool:
    """Return whether the task defines `head`."""
    return type(task).head is not Task.head


def without_options(task: Task) -> Task:
    """Return the task for evaluations, whose losses are comparable between runs."""
    plain = copy(task)
    plain.loss_options = LossOptions()
    return plain
