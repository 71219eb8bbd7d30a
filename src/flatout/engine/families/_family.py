"""Interface between a family of models, with its samples, and the engine."""

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
"""Name of a fused part."""
Head = Callable[[Any, Tensor], Tensor]
"""(model, states (K, hidden)) -> logits (K, ...)."""


@dataclass(frozen=True)
class FusePlan:
    """Conditions that decide which fused kernels fit a run."""

    noise: Noise
    joined: bool
    """True if attention receives query, key and value joined (`joined_attention`)."""
    residual_bf16: bool
    """True if blocks return bf16."""
    has_triton: bool


@dataclass(frozen=True)
class Schedule:
    """Ways in which the steps of a family's models may be launched."""

    compiles: bool = True
    """True if `train.compile: auto` may compile the model. Recurrent layers are cuDNN
    kernels already, at which Dynamo breaks graphs. If false, the fused kernels are used
    in any case."""
    records_padded: bool = False
    """True if steps of padded rows may be recorded as CUDA graphs: a forward pass never
    synchronises, and `tests/engine/test_gpu.py` tests for the same result."""
    records_unasked: bool = True
    """True if `train.cuda_graphs: auto` may record them: a recording keeps a second
    copy of activations, which are large for images."""
    launches_by_place: bool = False
    """True if layers launch kernels for each position of a row: then launching may
    limit a step of any size."""


class Samples:
    """Samples of a fixed shape (images, tables), which models accept instead of tokens.
    The defaults are for models of tokens."""

    one_shape: ClassVar[bool] = False
    """True if all samples have one shape, so that a step is compiled as a whole."""
    batch_statistics: ClassVar[bool] = False
    """True if a sample's output depends on others in its batch (BatchNorm): then
    micro-batches are part of the optimisation, and a step has one."""

    def shape_keys(self, facts: Any) -> dict[str, Any]:
        """Config keys for the shape of samples, from the `facts` of the train split."""
        return {}

    def statistics_keys(self, facts: Any) -> dict[str, Any]:
        """Config keys for the means and deviations that standardise samples; a
        checkpoint keeps its own."""
        return {}

    def checkpoint_statistics(
        self, config: Any, name: str, **where: Any
    ) -> dict[str, Any]:
        """`statistics_keys` of a checkpoint that stores them in another file than its
        config. `where`: options of `from_pretrained`. Raises OSError and ValueError if
        that file cannot be loaded or read."""
        return {}

    def fault(self, config: Any) -> str | None:
        """Reason why a model of this config cannot accept samples of its own shape;
        None if it can."""
        return None

    def shape(self, config: Any) -> tuple[int, ...] | None:
        """Shape of one sample; None for tokens. Raises ValueError if the config lacks
        it."""
        return None

    def augment(self, config: Any, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Fields of a micro-batch after random augmentation, which the task drew from
        (seed, epoch, row)."""
        return batch

    def extra_files(self, config: Any) -> dict[str, Any]:
        """Contents of JSON files by name, saved with the weights for other programs."""
        return {}

    def count_products(self, model: Any) -> int | None:
        """Multiplications of one sample's forward pass; None if each matrix is used
        once per position."""
        return None


class Family:
    """Plain family: runs the whole model, on padded rows.

    Normally models compute their head for every token, padding included, and most of it
    is not used. A family with `heads` passes only the states of targets to its head.
    """

    known: ClassVar[list[type[Family]]] = []
    model_types: ClassVar[frozenset[str]] = frozenset()
    model_classes: ClassVar[tuple[type, ...]] = ()
    """Model classes of this family that transformers does not have."""
    heads: ClassVar[Mapping[HeadKind, Head]] = {}
    """Functions from hidden states of targets to logits."""
    matrix_heads: ClassVar[frozenset[HeadKind]] = frozenset()
    """Heads that consist of one matrix, the output embedding."""
    packs: ClassVar[bool] = False
    """True if rows can be packed without padding; a parity test must cover it."""
    causal: ClassVar[bool] = False
    """True if tokens attend only to earlier ones: the last token represents the row."""
    attends: ClassVar[bool] = True
    """True if the model has attention, whose kernel can be chosen."""
    samples: ClassVar[Samples] = Samples()
    """Samples of a fixed shape that its models accept instead of tokens."""
    schedule: ClassVar[Schedule] = Schedule()
    first_type: ClassVar[str | None] = None
    """One of `model_types`, used by `kedro flatout init` for a model from scratch if
    conf/base has no model for the task."""

    def __init_subclass__(cls) -> None:
        Family.known.append(cls)

    def head(self, kind: HeadKind) -> Head | None:
        """Head for `kind`; None if only the whole model can be run."""
        return self.heads.get(kind)

    def packing_fault(
        self, config: Any, device_type: str, dtype: torch.dtype
    ) -> str | None:
        """Reason why rows cannot be packed here; None if they can."""
        if self.packs:
            return attention.kernel_fault(config, device_type, dtype)
        from flatout.engine.families import OWN_CODE, packable

        if getattr(config, OWN_CODE, False):
            return "the model has custom code, for which no packed path is tested"
        kind, known = config.model_type, ", ".join(packable())
        return f"model type {kind} has no tested packed path ({known} have)"

    def position_offset(self, config: Any) -> int:
        """Position of a row's first token, for models with explicit positions."""
        return 0

    def cpu_overhead_tokens(self, config: Any) -> int:
        """Cost of one more micro-batch on a CPU, in tokens."""
        return 16

    def num_layers(self, config: Any) -> int:
        """Number of layers that run in sequence; 0 if the config does not state it."""
        return int(getattr(config, "num_hidden_layers", 0) or 0)

    def pools_mean(self, kind: HeadKind, config: Any) -> bool:
        """Return whether the mean over a row's tokens represents it, not one token."""
        return False

    def inputs(
        self, config: Any, batch: Mapping[str, Tensor], max_length: int
    ) -> dict[str, Any]:
        """Arguments of the model for a micro-batch's fields."""
        names = ("input_ids", "attention_mask", "token_type_ids")
        inputs: dict[str, Any] = {name: batch[name] for name in names if name in batch}
        if type(self) is Family and "attention_mask" in inputs:
            # Integers, like tokenizers return it: some types subtract it from one.
            inputs["attention_mask"] = inputs["attention_mask"].long()
        offset = self.position_offset(config)
        if "cu_seqlens" in batch:
            inputs["position_ids"] = batch["position_ids"] + offset
            inputs["cu_seqlens"] = batch["cu_seqlens"]
            inputs["max_seqlen"] = max_length
        elif offset:  # the model would skip padding's id inside of a text
            ids = batch["input_ids"]
            places = torch.arange(ids.shape[1], device=ids.device)
            inputs["position_ids"] = places.unsqueeze(0) + offset
        return inputs

    def narrow(self, model: Any) -> Sequence[nn.Module]:
        """Limit the last layer to a pass's targets (K,); return the modules that read
        them from `target_index`, none if that is not possible."""
        return ()

    def fuse(self, model: Any, plan: FusePlan) -> Mapping[str, int]:
        """Replace parts of the model by equivalent fused kernels, for training; return
        the number of layers by part. Parts leave out layers of another class."""
        return {}


class Recurrent(Family):
    """LSTMs without attention; their layers are kernels of cuDNN or oneDNN already."""

    attends = False
    schedule = Schedule(compiles=False, records_padded=True, launches_by_place=True)


def lm_head(model: Any, hidden: Tensor) -> Any:
    """Output matrix over the vocabulary, under the name used by most models."""
    return model.lm_head(hidden)


def tag_tokens(model: Any, hidden: Tensor) -> Any:
    """Token classification head of BERT and most others: dropout, then one matrix."""
    return model.classifier(model.dropout(hidden))


def row_means(hidden: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """(B, T, N) hidden states -> (K, N) means over each row's tokens, in fp32."""
    hidden = hidden.float()
    if "cu_seqlens" not in batch:
        mask = batch["attention_mask"]  # (B, T)
        return (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    # `unsafe` skips a check of the lengths that would synchronise with the device.
    lengths = batch["cu_seqlens"].diff()
    sums = torch.segment_reduce(hidden[0], "sum", lengths=lengths, unsafe=True)
    means = sums / lengths.clamp(min=1).unsqueeze(-1)
    return means[: len(batch["target_index"])]  # without rows of padding at the end
