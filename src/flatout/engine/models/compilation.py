"""torch.compile, a block at a time.

Blocks that are alike share a graph, so the first step does not wait for as many
compilations as there are layers: 28 layers of Qwen3-0.6B's shape took over 240 s as one
graph and take 20 s so (16 cores, H200). With several devices whose gradients travel in
buckets, each block hands over its own as soon as it has them, beside the next ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flatout.engine.families import family_of
from flatout.engine.models.compile_cache import sources_digest
from flatout.engine.models.one_shape import OneShape

MOST_VARIANTS = 16
"""Graphs of all blocks together: embeddings, the first and the last layer differ from
the others, sizes of one row or token from all other sizes."""

LAYERS_A_PART = 3
"""77 s for the 12 layers of ViT-S/16 and 101 for the 16 of ResNet-50, imports and first
step included and ten others compiling beside them, where blocks for all shapes took 34
and 139. Page: 2026-11-24_images_h200.md."""


def compiled(model: Any, backend: str = "inductor") -> nn.Module:
    """Compile the model's blocks in place, one dynamic graph for all that are alike:
    totals differ from step to step, shapes stay bounded. A model that names no blocks
    is compiled as a whole; one whose samples have one shape, for that."""
    _configure()
    if model.family.samples.one_shape:
        return OneShape(model, backend)
    found = blocks(model)
    for module in [*found, *_between(model)] if found else [model]:
        module.compile(dynamic=True, backend=backend)
    plain: nn.Module = model
    return plain


def _between(model: Any) -> list[nn.Module]:
    """What stands before and behind the blocks: GPT-2's dropout, a decoder's norm."""
    return _beside(model.model.base_model)


def _beside(base: nn.Module) -> list[nn.Module]:
    found = base.children()
    return [m for m in found if type(m).__name__.endswith(("Norm", "Dropout"))]


def compile_blocks(model: nn.Module) -> None:
    """The blocks alone, for weights that are sharded block by block."""
    _configure()
    for module in blocks(model):
        module.compile(dynamic=True)


def blocks(model: Any) -> list[nn.Module]:
    """Layers, and embeddings where the model counts them among its blocks."""
    names = block_names(model)
    return [module for module in model.modules() if type(module).__name__ in names]


def distinct_parts(model: Any) -> int:
    """Of a Hugging Face model, how many kinds of blocks are compiled; its layers, where
    it names no blocks and becomes one graph. In a graph of one shape layers are cheaper
    to compile than kinds of blocks are for all shapes."""
    family = family_of(model.config)
    if family.samples.one_shape:
        return max(2, family.num_layers(model.config) // LAYERS_A_PART)
    names = set(getattr(model, "_no_split_modules", None) or ())
    kinds = {type(m).__name__ for m in model.modules()} & names
    if not kinds:
        return int(getattr(model.config, "num_hidden_layers", 1) or 1)
    between = {type(m).__name__ for m in _beside(model.base_model)}
    return len(kinds | between)


def block_names(model: Any) -> set[str]:
    """Classes of the Hugging Face model's blocks."""
    return set(getattr(model.model, "_no_split_modules", None) or ())


def _configure() -> None:
    config: Any = torch._dynamo.config
    config.cache_size_limit = MOST_VARIANTS
    # The last block may carry a hook that gathers its targets (narrowing.py).
    config.skip_nnmodule_hook_guards = False
    # A block's floats never change: as variables they are settled only after it has
    # been traced and differentiated, and both begin again.
    config.specialize_float = True
    # It would cut each block once more at DDP's buckets.
    config.optimize_ddp = False
    _avoid_slow_reductions()
    _find_graphs_again()


def _find_graphs_again() -> None:
    """PyTorch finds compiled graphs again by the source of the kernels in the forward
    pass. Those of the backward pass are not asked for, so a new version of flatout
    would go on with an old one's. Told apart by our own sources, graphs with our
    gradients may be kept too, which PyTorch refuses unless asked."""
    own = f"flatout-{sources_digest()}"
    config: Any = torch.compiler.config
    if own not in config.cache_key_tag:
        config.cache_key_tag += own
    functorch: Any = torch._functorch.config
    functorch.autograd_cache_allow_custom_autograd_functions = True


def _avoid_slow_reductions() -> None:
    """LayerNorm's two backward reductions as one kernel: 1.46 ms with the split that
    PyTorch 2.11 chooses for 69,000 x 768 on an H200, 0.15 ms with 32 rows a program."""
    import torch._inductor.config as inductor

    if hasattr(inductor.triton, "mix_order_reduction_split_size"):
        inductor.triton.mix_order_reduction_split_size = 32
    elif hasattr(inductor.triton, "mix_order_reduction"):
        inductor.triton.mix_order_reduction = False
