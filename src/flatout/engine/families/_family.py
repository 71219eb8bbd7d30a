"""The interface of a model family: its heads, its samples and its fused kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flatout.engine.ops import attention
from flatout.engine.ops.dropout import Noise
from flatout.engine.tasks import HeadKind

ATTENTION = "joined query, key and value"
"""The name of fused attention layers in reports."""
Head = Callable[[Any, Tensor], Tensor]
"""A function that maps a model and hidden states (K, hidden) to logits (K, ...)."""


@dataclass(frozen=True)
class FusePlan:
    """The conditions that decide which fused kernels a run can use."""

    noise: Noise
    joined: bool
    """Whether attention gets query, key and value joined (`joined_attention`)."""
    residual_bf16: bool
    """Whether blocks return their outputs in bf16."""
    has_triton: bool


@dataclass(frozen=True)
class Schedule:
    """Options for compiling and launching the training steps of a family's models."""

    compiles: bool = True
    """Whether `train.compile: auto` may compile the model. Recurrent layers should not
    be compiled, because Dynamo breaks the graph at their cuDNN kernels. If this is
    False, flatout's fused kernels are always used."""
    records_padded: bool = False
    """Whether steps on padded rows may be captured as CUDA graphs. Set this only if a
    forward pass never synchronises the device, and if `tests/engine/test_gpu.py`
    compares the results with and without a graph."""
    records_unasked: bool = True
    """Whether `train.cuda_graphs: auto` may capture steps on padded rows. A graph keeps
    a second copy of the activations, which are large for images."""
    launches_by_place: bool = False
    """Whether layers launch separate kernels for each position of a row. In that case,
    kernel launches can limit the speed even for large micro-batches."""


class Samples:
    """Samples of a fixed shape, such as images or numeric arrays, that some models
    accept instead of tokens. The defaults are for models that accept tokens."""

    one_shape: ClassVar[bool] = False
    """Whether all samples have one shape. If so, the model is compiled as a whole."""
    batch_statistics: ClassVar[bool] = False
    """Whether the output for a sample depends on the rest of its batch (BatchNorm). If
    so, splitting a batch would change the results, so each step has one micro-batch."""

    def shape_keys(self, facts: Any) -> dict[str, Any]:
        """Return the config keys and values for the shape of the samples. `facts`
        contains the statistics of the train split."""
        return {}

    def statistics_keys(self, facts: Any) -> dict[str, Any]:
        """Return the config keys and values for the means and standard deviations with
        which samples are standardised. A checkpoint keeps its own values."""
        return {}

    def checkpoint_statistics(
        self, config: Any, name: str, **where: Any
    ) -> dict[str, Any]:
        """Return the keys and values of `statistics_keys` for a checkpoint that stores
        them in a separate file. `where` contains the options for `from_pretrained`.
        Raises OSError if the file cannot be loaded, and ValueError if it is invalid."""
        return {}

    def fault(self, config: Any) -> str | None:
        """Return why a model with this config cannot process the samples, or None."""
        return None

    def shape(self, config: Any) -> tuple[int, ...] | None:
        """Return a sample's shape, or None for tokens. Raises ValueError if it is not
        known."""
        return None

    def augment(self, config: Any, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Augment a micro-batch at random and return its fields. `batch` includes the
        random parameters, which the task has drawn from (seed, epoch, row)."""
        return batch

    def extra_files(self, config: Any) -> dict[str, Any]:
        """Return the JSON files that other programs need, keyed by file name."""
        return {}

    def count_products(self, model: Any) -> int | None:
        """Return the number of multiplications in the forward pass of one sample, or
        None if each weight matrix is applied once per position."""
        return None


class Family:
    """The plain family, in which padded rows pass through the whole model.

    A transformers model applies its head to every token, including padding, and most of
    the result goes unused. In a family with `heads`, only the hidden states of the
    targets are passed to the head.
    """

    known: ClassVar[list[type[Family]]] = []
    model_types: ClassVar[frozenset[str]] = frozenset()
    model_classes: ClassVar[tuple[type, ...]] = ()
    """The model classes of this family that transformers does not provide."""
    heads: ClassVar[Mapping[HeadKind, Head]] = {}
    """The functions that compute logits from the targets' hidden states, by head
    kind."""
    matrix_heads: ClassVar[frozenset[HeadKind]] = frozenset()
    """The kinds of heads that consist only of the output embedding matrix."""
    packs: ClassVar[bool] = False
    """Whether rows can be packed without padding. A parity test must confirm this."""
    causal: ClassVar[bool] = False
    """Whether tokens attend only to earlier tokens. If so, a row is represented by its
    last token."""
    attends: ClassVar[bool] = True
    """Whether the model has attention layers, for which a kernel can be chosen."""
    samples: ClassVar[Samples] = Samples()
    """The kind of samples that the models accept. The default is tokens."""
    schedule: ClassVar[Schedule] = Schedule()
    first_type: ClassVar[str | None] = None
    """The model type that `kedro flatout init` trains from scratch if the model in
    conf/base does not fit the task."""

    def __init_subclass__(cls) -> None:
        Family.known.append(cls)

    def head(self, kind: HeadKind) -> Head | None:
        """Return the head function of this kind, or None if only the model's own
        forward method can compute the logits."""
        return self.heads.get(kind)

    def packing_fault(
        self, config: Any, device_type: str, dtype: torch.dtype
    ) -> str | None:
        """Return why rows cannot be packed on this device, or None if they can."""
        if self.packs:
            return attention.kernel_fault(config, device_type, dtype)
        from flatout.engine.families import OWN_CODE, packable

        if getattr(config, OWN_CODE, False):
            return "the model has custom code, for which no packed path is tested"
        kind, known = config.model_type, ", ".join(packable())
        return f"model type {kind} has no tested packed path (these have: {known})"

    def packed_positions(self, config: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the position ids (1, P) of packed tokens, as the model counts them."""
        return batch["position_ids"]

    def cpu_overhead_tokens(self, config: Any) -> int:
        """Return the fixed cost of a micro-batch on a CPU, as the number of tokens that
        the CPU could process in that time."""
        return 16

    def num_layers(self, config: Any) -> int:
        """Return the number of layers that run in sequence, or 0 if unknown."""
        return int(getattr(config, "num_hidden_layers", 0) or 0)

    def pools_mean(self, kind: HeadKind, config: Any) -> bool:
        """Return whether the mean over a row's tokens represents the row."""
        return False

    def inputs(
        self, config: Any, batch: Mapping[str, Tensor], max_length: int
    ) -> dict[str, Any]:
        """Return the model's keyword arguments for the fields of a micro-batch."""
        names = ("input_ids", "attention_mask", "token_type_ids")
        inputs: dict[str, Any] = {name: batch[name] for name in names if name in batch}
        if type(self) is Family and "attention_mask" in inputs:
            # Tokenizers return integers, and some models compute 1 - mask.
            inputs["attention_mask"] = inputs["attention_mask"].long()
        if "cu_seqlens" in batch:
            inputs["position_ids"] = self.packed_positions(config, batch)
            inputs["cu_seqlens"] = batch["cu_seqlens"]
            inputs["max_seqlen"] = max_length
        return inputs

    def narrow(self, model: Any) -> Sequence[nn.Module]:
        """Change the last layer so that it computes only the targets of a forward pass.
        Return the modules whose attribute `target_index` must be set to the targets
        (K,) before each pass, or () if the layer cannot be changed."""
        return ()

    def fuse(self, model: Any, plan: FusePlan) -> Mapping[str, int]:
        """Replace parts of the model, unless customised, with equivalent fused kernels
        for training. Return the number of replaced layers, keyed by part."""
        return {}


class Recurrent(Family):
    """LSTMs without attention, whose layers already run as cuDNN or oneDNN kernels."""

    attends = False
    schedule = Schedule(compiles=False, records_padded=True, launches_by_place=True)


def lm_head(model: Any, hidden: Tensor) -> Any:
    """Return the logits of the output projection, which most models call `lm_head`."""
    return model.lm_head(hidden)


def tag_tokens(model: Any, hidden: Tensor) -> Any:
    """Return the logits of the usual token classification head: dropout and a linear
    layer."""
    return model.classifier(model.dropout(hidden))


def row_means(hidden: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean of the hidden states (B, T, N) over each row, as fp32 (K, N)."""
    hidden = hidden.float()
    if "cu_seqlens" not in batch:
        mask = batch["attention_mask"]  # (B, T)
        return (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    # `unsafe` skips a check of the lengths, which would synchronise the device.
    lengths = batch["cu_seqlens"].diff()
    sums = torch.segment_reduce(hidden[0], "sum", lengths=lengths, unsafe=True)
    means = sums / lengths.clamp(min=1).unsqueeze(-1)
    return means[: len(batch["target_index"])]  # drop the padding rows at the end
