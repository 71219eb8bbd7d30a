"""Freed memory stays in the process."""

import subprocess
import sys

import pytest

TENSORS, MIB = 4, 8
SCRIPT = f"""
import ctypes, resource, torch
from flatout.engine.machine.garbage import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        kept = [torch.ones({MIB} * 2**18) for _ in range({TENSORS})]
        del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = faults()
assert keep_freed_memory()
faults()
print(usual, faults())
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(__import__("ctypes").CDLL(None), "mallopt"),
    reason="glibc's",
)
def test_memory_that_is_taken_again_is_not_cleared_again():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    usual, kept = map(int, done.stdout.split())
    pages = 8 * TENSORS * MIB * 2**20 / 4096
    assert usual > pages / 4
    assert kept < pages / 100
