"""What a family of models tells the engine of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from flatout.engine.families._samples import Samples
from flatout.engine.ops import attention
from flatout.engine.ops.dropout import Noise
from flatout.engine.tasks import HeadKind

Head = Callable[[Any, Tensor], Tensor]
"""(model, states (K, hidden)) -> logits (K, ...)."""


@dataclass(frozen=True)
class FusePlan:
    """What decides which of our kernels fit a run."""

    noise: Noise
    joined: bool
    """Whether attention takes query, key and value as one (`joined_attention`)."""
    residual_bf16: bool
    """Whether blocks hand on bf16."""
    narrowed: bool
    """Whether the last layer is given its targets alone."""
    has_triton: bool


@dataclass(frozen=True)
class Schedule:
    """How the steps of a family's models may be launched."""

    compiles: bool = True
    """Whether `train.compile: auto` may compile it. Recurrent layers are kernels of
    cuDNN already, at which Dynamo breaks its graphs. Without it, our kernels are put
    in place of theirs in any case."""
    records_padded: bool = False
    """Whether steps of padded rows may be recorded as CUDA graphs: a forward pass waits
    for nothing, and `tests/engine/test_gpu.py` shows that it trains the same."""
    records_unasked: bool = True
    """Whether `train.cuda_graphs: auto` may record them: a recording keeps activations
    a second time, and images have many in a step of few rows."""
    launches_by_place: bool = False
    """Whether layers launch kernels at each place of a row: then launching may bound a
    step of any size."""


class Family:
    """The plain family: models run as a whole, on padded rows.

    Usual models compute their head for every token, padding included, and throw most
    of it away. A family with `heads` gives the states of targets alone to its head.
    """

    known: ClassVar[list[type[Family]]] = []
    model_types: ClassVar[frozenset[str]] = frozenset()
    model_classes: ClassVar[tuple[type, ...]] = ()
    """Of its own, which transformers does not have."""
    heads: ClassVar[Mapping[HeadKind, Head]] = {}
    """Hidden states of targets alone -> logits."""
    matrix_heads: ClassVar[frozenset[HeadKind]] = frozenset()
    """Those that are one matrix, the output embedding."""
    packs: ClassVar[bool] = False
    """Whether rows run end to end, without padding; a parity test shows it."""
    causal: ClassVar[bool] = False
    """Whether tokens look to the left only: a row's state is that of its last token."""
    attends: ClassVar[bool] = True
    """Whether there is attention, whose kernel can be chosen."""
    samples: ClassVar[Samples] = Samples()
    """Of a fixed shape, that its models take in place of tokens."""
    schedule: ClassVar[Schedule] = Schedule()
    first_type: ClassVar[str | None] = None
    """Of `model_types`, what `kedro flatout init` takes for a model from scratch where
    conf/base has none for the task."""

    def __init_subclass__(cls) -> None:
        Family.known.append(cls)

    def head(self, kind: HeadKind) -> Head | None:
        """None where only the whole model can be run."""
        return self.heads.get(kind)

    def packing_fault(
        self, config: Any, device_type: str, dtype: torch.dtype
    ) -> str | None:
        """Why the padding-free path cannot be used here; None where it can."""
        if self.packs:
            return attention.kernel_fault(config, device_type, dtype)
        from flatout.engine.families import OWN_CODE, packable

        if getattr(config, OWN_CODE, False):
            return "the model's code is none of transformers', and no path is tested"
        kind, known = config.model_type, ", ".join(packable())
        return f"model type {kind} has no tested packed path ({known} have)"

    def precision_fault(self, precision: str, device_type: str) -> str | None:
        """Why `runtime.precision` cannot be used here; None where it can."""
        return None

    def position_offset(self, config: Any) -> int:
        """Position of a row's first token, where the model is told positions."""
        return 0

    def cpu_overhead_tokens(self, config: Any) -> int:
        """What one more micro-batch costs on a CPU, in tokens."""
        return 16

    def num_layers(self, config: Any) -> int:
        """What is launched one behind the other; 0 where its config does not say it."""
        return int(getattr(config, "num_hidden_layers", 0) or 0)

    def pools_mean(self, kind: HeadKind, config: Any) -> bool:
        """Whether a row's answer comes from the mean over its tokens, not from one."""
        return False

    def inputs(
        self, config: Any, batch: Mapping[str, Tensor], max_length: int
    ) -> dict[str, Any]:
        """A micro-batch's fields as arguments of the model."""
        names = ("input_ids", "attention_mask", "token_type_ids")
        inputs: dict[str, Any] = {name: batch[name] for name in names if name in batch}
        if type(self) is Family and "attention_mask" in inputs:
            # As tokenizers give it: some types subtract it from one.
            inputs["attention_mask"] = inputs["attention_mask"].long()
        offset = self.position_offset(config)
        if "cu_seqlens" in batch:
            inputs["position_ids"] = batch["position_ids"] + offset
            inputs["cu_seqlens"] = batch["cu_seqlens"]
            inputs["max_seqlen"] = max_length
        elif offset:  # the model would leave out padding's id in the midst of a text
            ids = batch["input_ids"]
            places = torch.arange(ids.shape[1], device=ids.device)
            inputs["position_ids"] = places.unsqueeze(0) + offset
        return inputs

    def narrow(self, model: Any) -> bool:
        """Let the last layer compute for targets only; whether it can."""
        return False

    def set_targets(self, model: Any, index: Tensor) -> None:
        """The targets (K,) of the next forward pass of a narrowed model."""

    def fuse(self, model: Any, plan: FusePlan) -> None:
        """Put our kernels in place of what they compute the same as, for training."""


def lm_head(model: Any, hidden: Tensor) -> Any:
    """One matrix over the vocabulary, under the name that most models give it."""
    return model.lm_head(hidden)


def tag_tokens(model: Any, hidden: Tensor) -> Any:
    """Dropout, then one matrix, as BERT and most others tag tokens."""
    return model.classifier(model.dropout(hidden))


def row_means(hidden: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """(B, T, N) hidden states -> (K, N) means over each row's tokens, in fp32."""
    hidden = hidden.float()
    if "cu_seqlens" not in batch:
        mask = batch["attention_mask"]  # (B, T)
        return (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    # `unsafe` leaves out a check of the lengths for which the host would wait.
    lengths = batch["cu_seqlens"].diff()
    sums = torch.segment_reduce(hidden[0], "sum", lengths=lengths, unsafe=True)
    means = sums / lengths.clamp(min=1).unsqueeze(-1)
    return means[: len(batch["target_index"])]  # rows of padding stand behind
