"""Check which arguments PyTorch expects each kernel to write, and how many graphs
different sizes create. This program only traces for a GPU, which need not exist."""

import sys
from types import SimpleNamespace

import torch
import triton
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from triton.backends.compiler import GPUTarget

from flatout.engine.ops.kernels.residual_norm import residual_norm
from flatout.engine.ops.kernels.rotary import rotary
from flatout.engine.ops.kernels.row_attention.forward import row_attention

BOUNDS = torch.tensor([0, 10, 30], dtype=torch.int32)
NORM = ["out_ptr", "sum_ptr", "mean_ptr", "rstd_ptr"]
NORM_BACKWARD = ["states_grad_ptr", "residual_grad_ptr", "parts_ptr"]


class Recorder:
    """A backend whose graphs return zeros. `written` contains one list per kernel."""

    def __init__(self):
        self.written, self.graphs = [], 0
        self.backend = aot_autograd(fw_compiler=self.compile, bw_compiler=self.compile)

    def compile(self, graph, _):
        self.graphs += 1
        for node in graph.graph.nodes:
            if "triton_kernel_wrapper" in str(node.target):
                self.written.append(node.kwargs["tensors_to_clone"])
        outputs = graph.graph.output_node().args[0]
        return make_boxed_func(lambda *_: [zeros(node) for node in outputs])


def zeros(node):
    value = getattr(node, "meta", {}).get("val")
    if isinstance(value, torch.Tensor):
        return torch.zeros([int(size) for size in value.shape], dtype=value.dtype)
    return value if value is None else int(value)


def trace(function, *inputs):
    recorder = Recorder()
    torch._dynamo.reset()
    compiled = torch.compile(function, dynamic=True, backend=recorder.backend)
    compiled(*inputs).sum().backward()
    return recorder.written


def rows(count, width=64):
    return torch.zeros(count, width, requires_grad=True)


def attend(joined):
    return row_attention(joined, 4, BOUNDS, 20, 0.25, 0.1, True, -1, 0)[0]


def turn(product, query, key):
    cos = torch.zeros(product.shape[0], 16)
    return rotary(product, cos, cos, query, key, 4, 1e-6)


def weights_of(dim):
    return [torch.zeros(dim, requires_grad=True) for _ in "qk"]


def norm(states, residual):
    vectors = [torch.zeros(64) for _ in range(3)]
    seed = torch.zeros((), dtype=torch.int32)
    bias, weight, shift = vectors
    return residual_norm(states, bias, residual, weight, shift, None, seed, 0.1, 1e-5)[
        0
    ]


def check_writes():
    for groups, apart in ((4, []), (2, ["apart_ptr"])):
        joined = torch.zeros(30, 4 + 2 * groups, 16, requires_grad=True)
        found = trace(attend, joined)
        backward = ["result_ptr", *apart, "sum_ptr"]
        assert found == [["out_ptr", "lse_ptr"], ["delta_ptr"], backward], found
    found = trace(norm, rows(30), rows(30))
    assert found == [NORM, NORM_BACKWARD], found
    for weights, parts in ((weights_of(16), ["parts_ptr"]), ([None, None], [])):
        found = trace(turn, torch.zeros(30, 8, 16, requires_grad=True), *weights)
        assert found == [["out_ptr"], ["result_ptr", *parts]], found


def check_sizes():
    """Check that one graph per pass serves 700, 100,000, 40 and 8 rows."""
    recorder = Recorder()
    torch._dynamo.reset()
    compiled = torch.compile(norm, dynamic=True, backend=recorder.backend)
    for count in (700, 100_000, 40, 8):
        inputs = rows(count), rows(count)
        torch._dynamo.maybe_mark_dynamic(inputs[0], 0)
        out = compiled(*inputs)
        if count == 700:  # other layers would have its size
            out.sum().backward()
    assert recorder.graphs == 2, recorder.graphs
    recorder = Recorder()
    compiled = torch.compile(turn, dynamic=True, backend=recorder.backend)
    for count in (700, 100_000, 40, 8):
        product = torch.zeros(count, 8, 16, requires_grad=True)
        out = compiled(product, *weights_of(16))
        if count == 700:
            out.sum().backward()
    assert recorder.graphs == 2, recorder.graphs


if __name__ == "__main__":
    target = GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    check_writes()
    check_sizes()
    sys.stdout.write("as expected\n")
