"""A function whose module is imported when it is called."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from flatout.engine.ops import attention
attention.register()
from transformers.models.bert import modeling_bert
assert "scipy.optimize" not in sys.modules
from transformers.loss.loss_for_object_detection import linear_sum_assignment as found
costs = [[4, 1, 3], [2, 0, 5], [3, 2, 2]]
rows, columns = found(costs)
from scipy.optimize import linear_sum_assignment, minimize
assert "scipy.optimize" in sys.modules
assert [list(rows), list(columns)] == [list(a) for a in linear_sum_assignment(costs)]
"""
OTHERS = """
import sys
from flatout.engine.machine.deferred import deferred
with deferred("scipy.optimize", "linear_sum_assignment"):
    from scipy.optimize import linear_sum_assignment
    import scipy.optimize._linesearch
    from scipy.optimize import minimize  # all of it, from here on
    import scipy.optimize
assert minimize is scipy.optimize.minimize and minimize(lambda x: x * x, 1.0).success
assert list(linear_sum_assignment([[1]])[0]) == [0]
with deferred("scipy.optimize", "linear_sum_assignment"):
    from scipy.optimize import linear_sum_assignment as now
assert now is scipy.optimize.linear_sum_assignment
with deferred("no_such.module", "function"):
    pass
"""


def run(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_start_is_spared_what_only_detection_needs():
    """Its losses find SciPy's function all the same."""
    run(PROGRAM)


def test_what_else_is_asked_of_the_module_imports_it():
    run(OTHERS)
