"""How a function that launches Triton kernels becomes an operator.

A compiled graph sees into it and launches the kernels itself. As opaque operators, each
called from Python, they kept the host busy longer than the device: BERT-base at global
batch 256 took 51 ms a step, of which an H200 worked 27.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from flatout.engine.ops.kernels.hashing import scramble

INTERPRETED = not isinstance(scramble, JITFunction)
"""TRITON_INTERPRET: such kernels cannot be traced."""


def wrap_triton(kernel: Any) -> Any:
    """What a compiled graph sees of a kernel. The name is PyTorch's own, which looks
    for it in the source of operators; PyTorch 2.11 refuses interpreted kernels."""
    return kernel if INTERPRETED else torch.library.wrap_triton(kernel)


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Registers `flatout::name`. Its kernels stand in `wrap_triton`, and write whole
    tensors that were made there: a view would be copied. A pointer that comes out of
    a helper of theirs makes PyTorch 2.11 take inputs for outputs. Sizes that follow
    from the number of rows are never one: a graph made for many would not serve few."""
    register = torch.library.custom_op if INTERPRETED else torch.library.triton_op
    result: Any = register(f"flatout::{name}", mutates_args=())
    return result  # type: ignore[no-any-return]
