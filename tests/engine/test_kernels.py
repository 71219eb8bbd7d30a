"""Compare Triton kernels with plain PyTorch, on a GPU or in Triton's interpreter, which
runs the same code."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from flatout.engine.machine.environment import child_environment
from tests.conftest import PROJECT

LIMIT_S = 900
"""Triton's interpreter takes minutes on a busy machine."""
pytestmark = pytest.mark.timeout(2 * LIMIT_S)
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton comes with CUDA builds of PyTorch"
)


def run(module, environment):
    return subprocess.run(
        [sys.executable, "-m", f"tests.engine.{module}"],
        env=child_environment(environment),
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@needs_triton
def test_kernels_equal_plain_pytorch():
    environment = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    done = run("kernel_checks", environment)
    assert done.stdout.strip().endswith("equal"), done.stderr[-3000:]


@needs_triton
def test_a_compiled_graph_knows_what_kernels_write_and_serves_all_sizes():
    done = run("kernel_writes", {})
    assert done.stdout.strip().endswith("as expected"), done.stderr[-3000:]
