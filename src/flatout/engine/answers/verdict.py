"""Compare a training step or predictions with a reference, and format the result."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import pandas as pd
import torch
from torch import Tensor

from flatout.engine.answers.plain_step import PlainStep, Step
from flatout.engine.parameters.faults import some_of

TIMES = 4
"""An error may exceed the unit roundoff, or the reference's rounding error, by this
factor."""
SMALL = 1e-3
"""The smallest gradient norm by which an error is divided, as a fraction of the norm of
the gradients of all modules."""
SHOWN = 5
UNSURE = 0.5
"""With a higher tolerance, a wrong gradient would not be detected."""

Value = Tensor | float


@dataclass(frozen=True)
class Check:
    """The comparison of a value of the run with the reference, a line of the table."""

    name: str
    flatout: str
    plain: str
    error: float
    tolerated: float

    @property
    def is_within(self) -> bool:
        return self.error <= self.tolerated  # False for NaN


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison. All fields can be stored as JSON."""

    step: str
    reference: str
    checks: list[Check]
    faults: list[str]
    notes: list[str] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        return not self.faults

    def lines(self) -> list[str]:
        """Return the verdict as lines of text for a console."""
        outcome = {True: "ok", False: "WRONG"}
        rows = [vars(check) | {"": outcome[check.is_within]} for check in self.checks]
        table = pd.DataFrame(rows).set_index("name").rename_axis(None)
        lines = table.to_string(float_format="{:.1e}".format).splitlines()
        end = "sound, equal to plain PyTorch but for rounding"
        if self.faults:
            end = f"NOT sound, {'; '.join(self.faults)}"
        head = [self.step, f"compared with {self.reference}"]
        return [*head, *lines, *self.notes, f"Verdict: {end}."]


def tolerances(roundoff: float) -> tuple[float, float]:
    """Return the smallest relative tolerance for a loss, and for gradients or outputs,
    given the unit roundoff. Sums may be computed in another order."""
    return max(1e-5, roundoff), max(1e-4, TIMES * roundoff)


def compared(
    name: str,
    values: Sequence[tuple[Value, Value, Value]],
    least: float,
    size: float = 0.0,
    times: float = TIMES,
) -> Check:
    """Compare tensors or numbers of a run with a reference. `values` contains those of
    the run, of the reference, and of the reference in the precision of the run. The
    error is the norm of the difference between the first two, divided by the norm of
    the reference or by `size` if that is larger. The error of the last one times
    `times` is the tolerance, which is at least `least`."""
    norm = _norm(plain for _, plain, _ in values)
    size = max(norm, size) or 1.0
    rounding = _norm(rounded - plain for _, plain, rounded in values) / size
    error = _norm(found - plain for found, plain, _ in values) / size
    shown = f"{_norm(found for found, _, _ in values):.6f}"
    return Check(name, shown, f"{norm:.6f}", error, max(least, times * rounding))


def compare(
    plain: PlainStep, found: Step, roundoff: float, times: float = TIMES
) -> tuple[list[Check], list[str], list[str]]:
    """Compare the step `found` with the reference `plain`. Return the checks, the
    problems, and notes."""
    losses = [(found.loss, plain.exact.loss, plain.rounded.loss)]
    for_loss, for_gradients = tolerances(roundoff)
    expected, counts = plain.exact.targets[0], sorted({*found.targets})
    apart = max(abs(count - expected) for count in counts)
    checks = [
        compared("loss", losses, for_loss, times=times),
        Check("targets", " and ".join(map(str, counts)), str(expected), apart, 0),
        compared("change of weights", list(plain.changes(found)), 1e-3),
    ]
    modules = list(_modules(plain, found, for_gradients, times))
    modules.sort(key=lambda c: (math.isnan(c.error), c.error / c.tolerated))
    worst = modules[::-1][:SHOWN]
    faults = [*_gradient_faults(plain, found), *wrong(checks)]
    if bad := sum(not check.is_within for check in modules):
        faults.append(
            f"the gradients of {bad} modules are wrong, most that of {worst[0].name} "
            f"(error {worst[0].error:.2g})"
        )
    return checks + worst, faults, list(_notes(plain, modules))


def wrong(checks: list[Check]) -> list[str]:
    bad = (check for check in checks if not check.is_within)
    return [f"{c.name} is {c.flatout}, plain {c.plain}" for c in bad]


def _modules(
    plain: PlainStep, found: Step, least: float, times: float
) -> Iterator[Check]:
    """Compare the gradients of each module with the reference."""
    own, exact, rounded = (s.gradients for s in (found, plain.exact, plain.rounded))
    size = SMALL * _norm(exact.values())
    for module, names in groupby(exact, lambda name: name.rpartition(".")[0]):
        values = [(own.get(n, 0.0), exact[n], rounded[n]) for n in names]
        yield compared(f"gradient {module}", values, least, size, times)


def _notes(plain: PlainStep, modules: list[Check]) -> Iterator[str]:
    """Describe gradients in which no error can be detected, because they are zero or
    consist mostly of rounding errors. An example is the first matrix of an adapter,
    whose gradient is zero while the second matrix is zero."""
    if unsure := [c.name.partition(" ")[2] for c in modules if c.tolerated > UNSURE]:
        yield (
            f"a fault would not be seen in {len(unsure)} of {len(modules)} modules, "
            f"whose gradients are mostly rounding: {some_of(unsure)}"
        )
    moved = {name for name, own in plain.exact.gradients.items() if own.any()}
    if silent := sorted(plain.trained - moved):
        yield (
            f"{len(silent)} trainable parameters have a gradient of zero or none, here "
            f"and in plain PyTorch; no fault can be seen in them: {some_of(silent)}"
        )


def _gradient_faults(plain: PlainStep, found: Step) -> Iterator[str]:
    if missing := sorted(plain.exact.gradients.keys() - found.gradients.keys()):
        yield (
            f"{len(missing)} trainable parameters received no gradient: "
            f"{some_of(missing)}"
        )
    more = found.gradients.keys() - plain.trained
    if extra := sorted(name for name in more if found.gradients[name].any()):
        yield f"frozen parameters are trained: {some_of(extra)}"
    if not found.ranks_agree:
        yield "the ranks have different weights after the step"


def _norm(values: Iterable[Value]) -> float:
    squares = (torch.as_tensor(v, dtype=torch.float64).square().sum() for v in values)
    return math.sqrt(sum(map(float, squares)))
