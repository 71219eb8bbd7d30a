"""Time and memory of flatout's loss, compared with Liger-Kernel and PyTorch.

    python -m tests.tools.kernel_rates

Needs a GPU and `pip install liger-kernel`. Each time is the median of forward and
backward passes in Triton's `do_bench`. Peak memory is what a call allocates in addition
to its inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

HIDDEN = 1_024
SHAPES = ((4_096, 32_000), (24_576, 32_000), (24_576, 151_936))
"""Pairs of number of targets and vocabulary size."""


def losses() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Return functions that compute the summed loss () from hidden states (K, H) in
    bf16, weights (V, H) in fp32 and labels (K,)."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    from flatout.engine.ops.kernels.linear_loss import linear_cross_entropy

    liger = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return {
        "flatout": lambda x, w, y: linear_cross_entropy(x, w, y)[0],
        "Liger": lambda x, w, y: liger(w.to(x.dtype), x, y),
        "PyTorch": lambda x, w, y: F.cross_entropy(
            (x @ w.to(x.dtype).t()).float(), y, reduction="sum"
        ),
    }


def measured(work: Callable[[], object]) -> str:
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    peak_gib = (torch.cuda.max_memory_allocated() - before) / 2**30
    times_ms = triton.testing.do_bench(work, warmup=100, rep=400, return_mode="median")
    return f"{times_ms:8.3f} ms  {peak_gib:6.2f} GiB"


def compare_losses(targets: int, pieces: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(targets, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(pieces, HIDDEN, device="cuda") / HIDDEN**0.5
    labels = torch.randint(pieces, (targets,), device="cuda")
    hidden.requires_grad_()
    weight.requires_grad_()
    for name, loss in losses().items():

        def step(loss: Callable[..., Tensor] = loss) -> None:
            hidden.grad = weight.grad = None
            loss(hidden, weight, labels).backward()

        say(f"loss {targets} x {pieces}", name, step)


def say(what: str, name: str, step: Callable[[], None]) -> None:
    try:
        found = measured(step)
    except torch.OutOfMemoryError:
        found = "out of memory"
    sys.stdout.write(f"{what:<30} {name:<10} {found}\n")
    sys.stdout.flush()


def main() -> None:
    for shape in SHAPES:
        compare_losses(*shape)


if __name__ == "__main__":
    main()
