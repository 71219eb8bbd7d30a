"""Apply torch.compile to the blocks of a model.

Identical blocks share a graph, so the compilation time does not grow with the number of
layers. For a model of the size of Qwen3-0.6B (28 layers), compiling one graph took over
240 s, and compiling blocks took 20 s (16 cores, H200). On several devices, the
gradients of a block can be reduced while the backward pass of other blocks runs."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatout.engine.families import family_of

MOST_VARIANTS = 16
"""The maximum number of compiled graphs of all blocks. There are separate graphs for
embeddings, the first layer, the last layer, and batches of a single row or token."""

LAYERS_A_PART = 3
"""Compiling this many layers for one shape takes about as long as compiling one block
for all shapes. ViT-S/16 (12 layers) took 77 s for one shape and 34 s as blocks.
ResNet-50 (16 layers) took 101 s and 139 s. The times include imports, the first step
and ten parallel compilations (H200, 2026-11-24)."""


def compiled(model: Any, backend: str = "inductor") -> nn.Module:
    """Compile the model's blocks in place and return the model. Identical blocks share
    one graph with dynamic shapes. A model that lists no blocks, or whose samples all
    have the same shape, is compiled as a whole."""
    _configure()
    if model.family.samples.one_shape:
        return OneShape(model, backend)
    found = blocks(model)
    between = _outside_blocks(model.model.base_model)
    for module in [*found, *between] if found else [model]:
        module.compile(dynamic=True, backend=backend)
    return model


def _outside_blocks(base: nn.Module) -> list[nn.Module]:
    """Return norms and dropouts outside the blocks, such as a decoder's final norm."""
    found = base.children()
    return [m for m in found if type(m).__name__.endswith(("Norm", "Dropout"))]


def compile_blocks(model: nn.Module) -> None:
    """Compile only the blocks, for a model whose weights are sharded per block."""
    _configure()
    for module in blocks(model):
        module.compile(dynamic=True)


def blocks(model: Any) -> list[nn.Module]:
    """Return the modules that the model lists as blocks, usually its layers."""
    names = set(getattr(model.model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def distinct_parts(model: Any) -> int:
    """Return how many different parts of a transformers model are compiled. These are
    its kinds of blocks, or all layers if the model lists no blocks. If samples have one
    shape, LAYERS_A_PART layers count as one part."""
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
    """Return a digest of the source code of flatout's models and kernels."""
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
    # The floats of a block never change. If traced as variables, they would become
    # constants only after tracing and differentiation, which would then start again.
    config.specialize_float = True
    # By default, each block would also be split at DDP's bucket boundaries.
    config.optimize_ddp = False
    _avoid_slow_reductions()
    _find_graphs_again()


def _find_graphs_again() -> None:
    """Add a digest of flatout's sources to the cache key of compiled graphs. PyTorch's
    own key covers only the kernels of the forward pass, so a new version of flatout
    would reuse an old backward pass. The digest also makes it safe to cache graphs with
    custom gradients, which PyTorch does not cache by default."""
    own = f"flatout-{sources_digest()}"
    config: Any = torch.compiler.config
    if own not in config.cache_key_tag:
        config.cache_key_tag += own
    functorch: Any = torch._functorch.config
    functorch.autograd_cache_allow_custom_autograd_functions = True


def _avoid_slow_reductions() -> None:
    """Configure Inductor to compute the reductions of LayerNorm's backward pass faster.
    On an H200 with inputs of 69,000 x 768, they take 1.46 ms with PyTorch 2.11's
    default split, and 0.15 ms with 32 rows per program."""
    import torch._inductor.config as inductor

    if hasattr(inductor.triton, "mix_order_reduction_split_size"):
        inductor.triton.mix_order_reduction_split_size = 32
    elif hasattr(inductor.triton, "mix_order_reduction"):
        inductor.triton.mix_order_reduction = False


Shapes = tuple[torch.Size, ...]


class OneShape(nn.Module):
    """A model that is compiled for the shape of the first batch, and for any other
    shape that occurs twice in succession. Batches of other shapes, e.g. the last batch
    of an epoch, run without compilation, which would take too long."""

    def __init__(self, model: nn.Module, backend: str = "inductor") -> None:
        super().__init__()
        self.model = model
        self._fast: Any = torch.compile(model.forward, dynamic=False, backend=backend)
        self._compiled: set[Shapes] = set()
        self._last: Shapes | None = None

    def forward(self, batch: dict[str, Tensor]) -> Any:
        """Run the compiled model, or the original one for other shapes."""
        shapes = tuple(tensor.shape for tensor in batch.values())
        if self._last in (None, shapes) and not _is_recorded():
            self._compiled.add(shapes)
        self._last = shapes
        return self._fast(batch) if shapes in self._compiled else self.model(batch)


def _is_recorded() -> bool:
    """Return whether a CUDA graph is being captured, which compilation would break."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
