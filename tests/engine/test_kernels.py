"""Triton kernels against plain PyTorch: on a GPU, and elsewhere in Triton's own
interpreter, which runs the same code."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from flatout.engine.environment import child_environment
from tests.conftest import PROJECT


@pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton comes with CUDA builds of PyTorch"
)
def test_kernels_equal_plain_pytorch():
    environment = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.kernel_checks"],
        env=child_environment(environment),
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.strip().endswith("equal"), done.stderr[-3000:]
