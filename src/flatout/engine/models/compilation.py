"""torch.compile, applied to single blocks.

Equal blocks share a graph, so the number of layers does not multiply the compilation
time of the first step: 28 layers of Qwen3-0.6B's shape needed over 240 s as one graph
and 20 s as blocks (16 cores, H200). With several devices that reduce gradients in
buckets, each block provides its gradients early, while the next blocks compute theirs.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatout.engine.families import family_of

MOST_VARIANTS = 16
"""Number of graphs of all blocks together: embeddings, the first and the last layer
have different graphs, as have sizes of one row or token."""

LAYERS_A_PART = 3
"""77 s for the 12 layers of ViT-S/16 and 101 s for the 16 of ResNet-50, including
imports, first step and ten parallel compilations; blocks for all shapes needed 34 and
139 s (H200, 2026-11-24)."""


def compiled(model: Any, backend: str = "inductor") -> nn.Module:
    """Compile the model's blocks in place, with one dynamic graph for equal blocks:
    totals differ from step to step, shapes stay bounded. A model without named blocks,
    or with samples of one shape, is compiled as a whole."""
    _configure()
    if model.family.samples.one_shape:
        return OneShape(model, backend)
    found = blocks(model)
    between = _outside_blocks(model.model.base_model)
    for module in [*found, *between] if found else [model]:
        module.compile(dynamic=True, backend=backend)
    return model


def _outside_blocks(base: nn.Module) -> list[nn.Module]:
    """Modules before and after the blocks: GPT-2's dropout, a decoder's norm."""
    found = base.children()
    return [m for m in found if type(m).__name__.endswith(("Norm", "Dropout"))]


def compile_blocks(model: nn.Module) -> None:
    """Compile only the blocks, for weights that are sharded per block."""
    _configure()
    for module in blocks(model):
        module.compile(dynamic=True)


def blocks(model: Any) -> list[nn.Module]:
    """Layers, and embeddings if the model lists them among its blocks."""
    names = set(getattr(model.model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def distinct_parts(model: Any) -> int:
    """Number of compiled kinds of blocks of a Hugging Face model; of layers, if it
    names no blocks and becomes one graph. In a graph of one shape, layers compile
    faster than kinds of blocks for all shapes."""
    family = family_of(model.config)
    if family.samples.one_shape:
        return max(2, family.num_layers(model.config) // LAYERS_A_PART)
    names = set(getattr(model, "_no_split_modules", None) or ())
    kinds = {type(m).__name__ for m in model.modules()} & names
    if not kinds:
        return int(getattr(model.config, "num_hidden_layers", 1) or 1)
    between = {type(m).__name__ for m in _outside_blocks(model.base_model)}
    return len(kinds | between)


@cache
def sources_digest() -> str:
    """Digest of the sources of kernels and graphs."""
    digest = hashlib.blake2s(digest_size=8)
    engine = Path(__file__).parents[1]
    for file in sorted([*engine.glob("models/*.py"), *engine.glob("ops/**/*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _configure() -> None:
    config: Any = torch._dynamo.config
    config.cache_size_limit = MOST_VARIANTS
    # The last block may have a hook that gathers its targets (narrowing.py).
    config.skip_nnmodule_hook_guards = False
    # A block's floats never change: as variables they are fixed only after tracing and
    # differentiation, which then start again.
    config.specialize_float = True
    # Otherwise each block is also split at DDP's buckets.
    config.optimize_ddp = False
    _avoid_slow_reductions()
    _find_graphs_again()


def _find_graphs_again() -> None:
    """Distinguish cached graphs by flatout's sources. PyTorch looks them up by the
    kernels of the forward pass only, so a new version of flatout would use an old
    backward pass. Graphs with custom gradients can then be cached too, which PyTorch
    refuses by default."""
    own = f"flatout-{sources_digest()}"
    config: Any = torch.compiler.config
    if own not in config.cache_key_tag:
        config.cache_key_tag += own
    functorch: Any = torch._functorch.config
    functorch.autograd_cache_allow_custom_autograd_functions = True


def _avoid_slow_reductions() -> None:
    """Compute LayerNorm's two backward reductions in one kernel: 1.46 ms with PyTorch
    2.11's split for 69,000 x 768 on an H200, 0.15 ms with 32 rows per program."""
    import torch._inductor.config as inductor

    if hasattr(inductor.triton, "mix_order_reduction_split_size"):
        inductor.triton.mix_order_reduction_split_size = 32
    elif hasattr(inductor.triton, "mix_order_reduction"):
        inductor.triton.mix_order_reduction = False


Shapes = tuple[torch.Size, ...]


class OneShape(nn.Module):
    """Compiles for the first batch's shape, and for one that occurs twice in a row.
    Others, such as an epoch's last batch, run uncompiled: compilation is slow."""

    def __init__(self, model: nn.Module, backend: str = "inductor") -> None:
        super().__init__()
        self.model = model
        self._fast: Any = torch.compile(model.forward, dynamic=False, backend=backend)
        self._compiled: set[Shapes] = set()
        self._last: Shapes | None = None

    def forward(self, batch: dict[str, Tensor]) -> Any:
        """Run `model`, compiled or not."""
        shapes = tuple(tensor.shape for tensor in batch.values())
        if self._last in (None, shapes) and not _is_recorded():
            self._compiled.add(shapes)
        self._last = shapes
        return self._fast(batch) if shapes in self._compiled else self.model(batch)


def _is_recorded() -> bool:
    """Return whether a CUDA graph is recorded, which compilation would break."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
