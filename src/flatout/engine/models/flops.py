"""Count the floating-point operations of a training step, and list GPUs' peak FLOP/s.

The count depends only on the model and the data, not on the implementation. It covers
the matrix multiplications of the forward and backward pass. A multiply-add counts as
two floating-point operations (FLOPs):

- Every layer matrix counts 6 FLOPs per weight and non-padding token (2 forward, 4
  backward; PaLM, Chowdhery et al. 2022, appendix B). This includes the last layer,
  although flatout computes parts of it only for targets (narrowing.py).
- The head and the pooler count only for targets. A head that is tied to the embedding
  counts as a head, and the embedding does not count.
- Attention counts 12 x heads x head_dim for each pair of a token and a token that it
  attends to. Pairs are within a row or document. Causal layers have only pairs with
  earlier tokens, and local layers only pairs within the window.
- Gradients of frozen parameters (`train.freeze`) do not count. Neither do gradients of
  the layers below them if those layers have no trained parameters.
- Padding, embedding lookups, biases, norms, softmax, rotary embeddings, activation
  functions and recomputation in the backward pass do not count.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from flatout.engine.families import family_of
from flatout.engine.machine.runtime import DTYPES, Runtime
from flatout.engine.ops.attention import head_dimension
from flatout.engine.rows.layout import Ints

PEAK_BF16_TFLOPS = {
    "H200": 989.5,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.5,
    "H100": 989.5,
    "B200": 2250.0,
    "A100": 312.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "V100": 125.0,
    "T4": 65.0,
}
"""Peak TFLOP/s in dense bf16 (fp16 for GPUs without bf16) from NVIDIA's data sheets."""


@dataclass(frozen=True)
class AttentionPairs:
    """Counts the pairs of tokens in which one attends to the other, over all layers."""

    causal: bool
    layers_by_reach: dict[int | None, int]
    """The number of layers by attention distance in tokens (None for whole rows)."""

    @classmethod
    def of(cls, config: Any, *, causal: bool) -> AttentionPairs:
        """Read a model config. If `causal` is true, tokens attend only to earlier
        ones."""
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None)
        if kinds is None:
            kinds = ["sliding_attention"] * getattr(config, "num_hidden_layers", 0)
        # A causal window includes the token itself; a bidirectional window does not.
        reach = window - 1 if window is not None and causal else window
        reaches = [reach if kind == "sliding_attention" else None for kind in kinds]
        return cls(causal, dict(Counter(reaches)))

    def __call__(self, lengths: Ints) -> int:
        """Return the number of pairs in rows or documents with these `lengths` (N,)."""
        found = 0
        for reach, layers in self.layers_by_reach.items():
            far = lengths - 1 if reach is None else np.minimum(lengths - 1, reach)
            before = int((far * lengths - far * (far + 1) // 2).sum())
            sides = before if self.causal else 2 * before
            found += layers * (sides + int(lengths.sum()))
        return found


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operation counts for one forward and backward pass."""

    body: int
    """FLOPs per token."""
    head: int
    """FLOPs per target."""
    attention: float
    """FLOPs per pair of tokens that attend to each other."""

    @classmethod
    def of(cls, model: Any) -> ModelFlops:
        config, base = model.config, model.base_model
        if counted := family_of(config).samples.count_products(model):
            weights = sum(map(_product_weights, model.modules()))
            by_weight = sum(_operations(model).values()) / weights
            return cls(body=int(by_weight * counted), head=0, attention=0)
        late = [model.get_output_embeddings(), getattr(base, "pooler", None)]
        at_targets = {m for part in late if part is not None for m in part.modules()}
        at_tokens = set(base.modules()) - at_targets
        operations = _operations(model)
        body = sum(operations[module] for module in at_tokens)
        heads = getattr(config, "num_attention_heads", 0)
        # A model with custom code may use other names for its sizes.
        named = heads and hasattr(config, "hidden_size")
        width = heads * head_dimension(config) if named else 0
        return cls(
            body=body,
            head=sum(operations.values()) - body,
            attention=(4 + 8 * _share_with_backward(model)) * width,
        )

    def over(self, tokens: int, targets: int, attention_pairs: int) -> int:
        """Return the FLOPs of a forward and backward pass over the given numbers of
        tokens, targets and attention pairs."""
        dense = self.body * tokens + self.head * targets
        return dense + int(self.attention * attention_pairs)


def _operations(model: nn.Module) -> dict[nn.Module, int]:
    """Return the FLOPs per input vector of each module's own matrices. A weight needs 2
    FLOPs in the forward pass, 2 for its own gradient if it is trained, and 2 for the
    gradient of the input if any layer below it is trained."""
    below, found = next(model.parameters()).requires_grad, {}
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        trained = any(p.requires_grad for p in own)
        passes = 1 + int(trained) + int(below)
        found[module] = 2 * passes * _product_weights(module)
        below = below or trained
    return found


def _share_with_backward(model: nn.Module) -> float:
    """Return the fraction of layers that need a backward pass because a parameter in or
    below them is trained."""
    layers = next((m for m in model.modules() if isinstance(m, nn.ModuleList)), None)
    if layers is None:
        return 1.0
    places = {id(p): place for place, m in enumerate(layers) for p in m.parameters()}
    place = 0
    for parameter in model.parameters():
        if id(parameter) in places:
            place = places[id(parameter)]
        elif place:  # after the last layer
            place = len(layers)
        if parameter.requires_grad:
            break
    return 1 - place / len(layers)


def _product_weights(module: nn.Module) -> int:
    """Count the elements of a module's own weight matrices. Embeddings count as 0."""
    if isinstance(module, nn.Embedding):
        return 0
    return sum(p.numel() for p in module.parameters(recurse=False) if p.dim() > 1)


HOST_S_PER_BLOCK = 2.2e-3
"""The time in seconds that the host needs to launch the forward and backward pass of a
compiled block. The 12 blocks of BERT-base take 25 to 33 ms."""
USED_SHARE = 0.5
"""The fraction of the data-sheet peak that an efficient step reaches."""


def launch_tokens(width: int, runtime: Runtime) -> int:
    """Return how many tokens a GPU can process while the host launches a micro-batch,
    for blocks of 12 x width^2 weights. The result is 0 on a CPU, in fp32 (where the
    host is seldom the bottleneck), and if the GPU's peak is unknown."""
    peak = peak_tflops(runtime.device_name) if runtime.is_cuda else None
    if peak is None or not width or runtime.precision == "fp32":
        return 0
    token_s = 6 * 12 * width**2 / (USED_SHARE * peak * 1e12)
    return int(HOST_S_PER_BLOCK / token_s)


def peak_tflops(device_name: str) -> float | None:
    """Return the bf16 peak of a device in TFLOP/s, or None if the table lacks it."""
    for name, peak in PEAK_BF16_TFLOPS.items():
        if name in device_name:
            return peak
    return None


MEASURED_SHARE = 0.8
"""The fraction of the data-sheet peak that torch.mm reaches (790 / 989.5 on H200)."""
TRIED_S = 0.1


def sheet_tflops(runtime: Runtime) -> float | None:
    """Return a GPU's peak TFLOP/s in the run's precision, or None without a GPU. The
    peak is from the data sheet. For fp32 and for unknown GPUs, it is estimated from the
    speed of matmuls."""
    known = peak_tflops(runtime.device_name)
    if known is not None and runtime.precision != "fp32":
        return known
    if not (runtime.is_cuda and torch.cuda.is_available()):
        return None
    with torch.random.fork_rng(devices=[runtime.device]):  # keep the run's RNG state
        return measured_tflops(runtime, TRIED_S) / MEASURED_SHARE


def measured_tflops(runtime: Runtime, seconds: float) -> float:
    """Time square matmuls for `seconds` in the run's precision, and return the best
    throughput in TFLOP/s."""
    size, calls = (8192, 4) if runtime.is_cuda else (1536, 1)
    a, b = (
        torch.randn(size, size, device=runtime.device, dtype=DTYPES[runtime.precision])
        for _ in range(2)
    )
    best_s, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < seconds:
        runtime.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            torch.mm(a, b)
        runtime.synchronize()
        best_s = min(best_s, (time.perf_counter() - start) / calls)
    return 2 * size**3 / best_s / 1e12
