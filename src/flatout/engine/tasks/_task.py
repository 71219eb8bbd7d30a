"""What a task is: which labels rows have, where targets lie, their loss and metrics.

Torch is imported inside of the methods that compute with it: `split` asks a task for
its labels and never loads torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.parameters import ModelSettings
from flatout.engine.rows.layout import Ints
from flatout.engine.rows.rows import Rows
from flatout.engine.rows.vocabulary import Vocabulary

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IGNORED = -100
"""Label of a place without a target (PyTorch's own convention)."""


class TaskError(ValueError):
    """A task that rows, tokenizer or model do not serve; says what to do."""


class HeadKind(Enum):
    """What a model's head is given; families map kinds to heads."""

    ROW = "one state a row"
    TOKEN = "the states of tokens"
    VOCABULARY = "the states of tokens, for scores of all pieces"
    DIRECTIONS = "two states a token, from the left and from the right, for the same"
    WHOLE = "nothing alone: the whole model runs"

    @property
    def one_a_row(self) -> bool:
        """Whether each row has one target."""
        return self in (HeadKind.ROW, HeadKind.WHOLE)


@dataclass(frozen=True)
class Texts:
    """What a task makes of texts."""

    form: str = "text"
    """Of a row: a text; `words` with a label each; `pairs` of texts."""
    completions: bool = False
    """Whether rows may be completions of prompts, or messages."""
    causal: bool = False
    """Whether a token may only see those before it."""
    predicts_neighbours: bool = False
    """Whether what ends a text is a target: a text that is cut has none."""
    joined: bool = False
    """Whether texts may be joined to full rows (`tokenize.join_texts`)."""
    whole_words: bool = False
    """Whether a tokenizer trained here takes each word, between spaces, as a piece."""


@dataclass(frozen=True)
class Targets:
    """Of B rows: K_r targets in row r."""

    places: Sequence[Ints]
    """(K_r,) in each row."""
    labels: Sequence[npt.NDArray[Any]]
    """(K_r, ...) what is to be found there."""
    values: Sequence[Any] | None = None
    """Rows in place of their own, as masked ones; None: they are trained on as is."""
    fields: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """(B, ...) further fields of the micro-batch: what chance does to a sample."""


@dataclass(frozen=True)
class LossOptions:
    """What a training makes of the loss of classes; evaluations go without."""

    class_weights: tuple[float, ...] | None = None
    """By the number of the class."""
    label_smoothing: float = 0.0
    """Share of each target that is spread over all classes (Szegedy et al. 2016)."""
    focal_gamma: float = 0.0
    """Losses count (1 - probability of the target) to this power (Lin et al. 2017)."""


class Judged(NamedTuple):
    """What the model says of one target, for people."""

    loss: float
    label: str | float
    prediction: str | float
    score: float | None
    """Probability of the prediction, where it has one."""
    wrong: bool


class Metrics(ABC):
    """Of the targets of a split, on the device; read once, at the end."""

    @abstractmethod
    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add (k, ...) targets; nothing waits for the device."""

    def tensors(self) -> list[Tensor]:
        """To be summed over ranks, in place."""
        return []

    def kept(self) -> list[list[Tensor]]:
        """Parts (k, ...) of what is needed whole; in place of each list come the parts
        of all ranks."""
        return []

    @abstractmethod
    def compute(self) -> dict[str, Any]:
        """Figures by name, those of `Task.figures`; one that is NaN is left out."""


class Task(ABC):
    """A task of a run; a class of one's own overrides what differs.

    The defaults are those of one label a row from a linear head, which `loss` compares
    with the logits. Methods on rows are pure in (seed, epoch, row).
    """

    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    """Of transformers, that builds the model with its head."""
    architectures: ClassVar[tuple[str, ...]] = ("ForSequenceClassification",)
    """How the names of such models end."""
    head_kind: ClassVar[HeadKind] = HeadKind.ROW
    """What the head is given, and which of its family's heads a model has."""
    whole_batch: ClassVar[bool] = False
    """Whether the loss compares the samples of a global batch with one another, as
    contrastive losses do, one target each. If a step has several micro-batches or
    ranks, logits are computed twice (train/cached_gradients.py). Evaluations compare
    COMPARED_ROWS rows at a time (train/evaluate.py)."""
    label_type: ClassVar[Any] = None
    """Arrow type of a label as split keeps it; None: rows have none. string: the name
    of a class; float64: a number; list(...): several."""
    texts: ClassVar[Texts] = Texts()
    label_dtype: ClassVar[Any] = np.dtype(np.int64)
    """Of targets in a batch. The label of padding is IGNORED, of floats NaN."""
    label_shape: ClassVar[tuple[int, ...]] = ()
    """Of one target."""
    takes_options: ClassVar[frozenset[str]] = frozenset()
    """Of `LossOptions`, by name."""
    loss_options: LossOptions = LossOptions()
    """Of this run."""
    figures: ClassVar[Mapping[str, bool]] = {"loss": False}
    """What an evaluation finds, by name: whether higher is better. `perplexity` is
    e to the mean loss."""
    pipeline_tag: ClassVar[str] = "text-classification"
    """The task's name on the Hugging Face Hub and in MLflow."""

    def __init__(
        self,
        settings: ModelSettings,
        label_names: Sequence[str] = (),
        vocabulary: Vocabulary | None = None,
        seed: int = 0,
    ) -> None:
        """Raises TaskError where the tokenizer does not serve the task."""
        self.settings = settings
        self.label_names = tuple(label_names)
        self.vocabulary = vocabulary
        self.seed = seed

    # What rows and models have.

    @property
    def targets_per_token(self) -> float:
        """Share of tokens whose logits a step holds, for the estimate of memory."""
        return 0.0

    def token_label_type(self) -> Any:
        """Arrow type of `labels` in token rows."""
        return pa.int64()

    def label_fault(self, labels: Any) -> str | None:
        """What is wrong with the labels of a split, an Arrow column of `label_type`."""
        return None

    def encode_labels(self, labels: Any) -> Any:
        """Labels of rows, an Arrow array of `label_type`, as targets of token rows."""
        return labels.cast(self.token_label_type())

    def config_keys(self) -> dict[str, Any]:
        """What the model's config must say: classes, their names, the problem."""
        return {}

    @classmethod
    def fits(cls, config: Any, kind: type) -> bool:
        """Whether a saved model of class `kind` answers this task."""
        return False

    def model_fault(self, config: Any) -> str | None:
        """Why a model of this config does not serve; None where it does."""
        return None

    def tokenizer_fault(self, tokenizer: Any) -> str | None:
        """Why a transformers tokenizer does not serve; None where it does."""
        return None

    # Targets, on the host.

    def targets(
        self, rows: Rows, row_ids: Ints, epoch: int, *, pools_last: bool
    ) -> Targets:
        """Of `row_ids` (B,). `pools_last`: a row's state is that of its last token,
        else of its first."""
        ends = rows.lengths(row_ids) - 1 if pools_last else np.zeros_like(row_ids)
        labels = rows.labels_of(row_ids)
        return Targets(list(ends.reshape(-1, 1)), list(labels[:, None]))

    def num_targets(self, rows: Rows, row_ids: Ints, epoch: int) -> int:
        """Of the global batch `row_ids` (N,)."""
        return len(row_ids)

    def divisor(self, rows: Rows, row_ids: Ints, epoch: int) -> float | None:
        """What the summed loss of the global batch is divided by, as the sum of its
        targets' weights; None: by their number."""
        return None

    # Logits, loss and figures, on the device.

    def head(self, model: Any, states: Tensor) -> Tensor:
        """Logits (K, ...) of the targets' last hidden states (K, hidden). A task that
        defines it brings its own head; all others have the head of `head_kind`."""
        raise NotImplementedError

    @abstractmethod
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Summed over the targets, fp32 (): of logits (K, ...) and labels (K, ...)."""

    def hits(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        """Right predictions and predictions, () each; None where none is right."""
        return None

    def metrics(self, device: torch.device) -> Metrics | None:
        """For one evaluation; None: the loss alone."""
        return None

    def real(self, labels: Tensor) -> Tensor:
        """(K,) bool: which labels (K, ...) are targets; (K, ...) where each of them is
        one of its own."""
        flat = labels.flatten(1)[:, 0] if labels.dim() > 1 else labels
        return ~flat.isnan() if flat.is_floating_point() else flat != IGNORED

    def chance_loss(self, num_outputs: int) -> float | None:
        """Mean loss of a model that knows nothing; None where that depends on data."""
        return None

    # For people.

    @abstractmethod
    def judge(
        self, logits: Tensor, labels: Tensor, decode: Callable[[Ints], str]
    ) -> list[Judged]:
        """Of logits (K, ...) and labels (K, ...), K small. `decode`: ids as text."""

    def answer_fields(self) -> list[Any]:
        """Arrow fields of a prediction; none where rows have no answer of their own."""
        return []

    def answers(self, logits: npt.NDArray[np.float32]) -> Mapping[str, Any]:
        """Columns of `answer_fields` for outputs (N, ...) of N rows."""
        return {}

    def row_answers(
        self, logits: npt.NDArray[np.float32], rows: Any
    ) -> Mapping[str, Any]:
        """The same of the targets of `rows` in turn, (K, ...)."""
        return self.answers(logits)


class RowAnswers(ABC):
    """Also derived from by a task whose rows have several targets and one answer."""

    @abstractmethod
    def target_outputs(self, logits: Tensor, labels: Tensor) -> Tensor:
        """What is kept (K, ...) of the logits (K, ...) of some targets; on the device,
        whose memory may not hold the logits of all."""

    @abstractmethod
    def row_outputs(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """What `answers` is given of a micro-batch's rows (B, ...), by the
        `target_outputs` (K, ...) of all of its targets; on the device."""


class OwnPooling(ABC):
    """Also derived from by a task that says itself which states are a row's, and whose
    models are those of sentence-transformers."""

    @property
    @abstractmethod
    def pooling(self) -> str:
        """mean, first or last: of the states of its tokens."""


def ignored_label(dtype: Any) -> float:
    """Of padding, by the type of targets."""
    return float("nan") if np.issubdtype(dtype, np.floating) else IGNORED


def brings_head(task: Task) -> bool:
    """Whether `head` is the task's own."""
    return type(task).head is not Task.head


def pooling_of(task: Task) -> str | None:
    """mean, first or last; None: as the model's family has it."""
    return task.pooling if isinstance(task, OwnPooling) else None


def without_options(task: Task) -> Task:
    """As evaluations have it, whose losses compare between runs."""
    plain = copy(task)
    plain.loss_options = LossOptions()
    return plain
