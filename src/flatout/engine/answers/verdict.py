"""Compare a training step or predictions with a reference, and format the result."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.engine.answers.plain_step import PlainStep, Step

ROUNDOFF = {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""The unit roundoff of each precision: half the distance from 1 to the next number."""
LEAST = 1e-4
"""The smallest relative tolerance for gradients and outputs, whose sums may be computed
in another order. The smallest tolerance for a loss is a tenth of this value."""
TIMES = 4
"""The factor by which an error may exceed the unit roundoff, or the rounding error of
the reference."""
SMALL = 1e-3
"""The error of a module's gradient is divided by the norm of the gradient, or by this
fraction of the total gradient norm if that is larger."""
SHOWN = 5
UNSURE = 0.5
"""The highest tolerance at which a check is meaningful. With a higher tolerance, a
wrong gradient would not be detected."""


@dataclass(frozen=True)
class Check:
    """The comparison of a value of the run (`found`) with the reference (`plain`)."""

    name: str
    found: str
    plain: str
    error: float
    tolerance: float

    @property
    def is_within(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison. All fields can be stored as JSON."""

    step: str
    reference: str
    checks: list[Check]
    faults: list[str]
    notes: list[str] = field(default_factory=list)
    subject: str = "the step is that"

    @property
    def is_sound(self) -> bool:
        return not self.faults

    def lines(self) -> list[str]:
        """Return the verdict as lines of text for a console."""
        end = f"sound, {self.subject} of plain PyTorch but for rounding"
        if self.faults:
            more = len(self.faults) - 1
            rest = f" (and {more} more below)" if more else ""
            end = f"NOT sound, {self.faults[0]}{rest}"
        width = max((len(row.name) for row in self.checks), default=0)
        head = f"  {'':{width}}  {'flatout':>12}  {'plain':>12}  "
        table = [
            f"  {row.name:{width}}  {row.found:>12}  {row.plain:>12}  "
            f"{row.error:9.1e}  {row.tolerance:9.1e}  "
            f"{'ok' if row.is_within else 'WRONG'}"
            for row in self.checks
        ]
        return [
            self.step,
            f"compared with {self.reference}",
            f"{head}{'error':>9}  {'tolerated':>9}",
            *table,
            *self.notes,
            *self.faults[1:],
            f"Verdict: {end}.",
        ]


def compared(
    name: str,
    values: Sequence[tuple[Tensor, Tensor, Tensor]],
    least: float,
    *,
    size: float = 0.0,
    times: float = TIMES,
) -> Check:
    """Compare tensors of a run with a reference. `values` contains the tensors of the
    run, of the reference, and of the reference in the precision of the run. The error
    is the norm of the difference between the first two, divided by the norm of the
    reference or by `size` if that is larger. The error of the last one times `times`
    is the tolerance, which is at least `least`."""
    norm = _norm(plain for _, plain, _ in values)
    size = max(norm, size) or 1.0
    rounding = _norm(rounded - plain for _, plain, rounded in values) / size
    error = _norm(found - plain for found, plain, _ in values) / size
    shown = f"{_norm(found for found, _, _ in values):.6f}"
    return Check(name, shown, f"{norm:.6f}", error, max(least, times * rounding))


def compared_loss(
    losses: tuple[float, float, float], roundoff: float, times: float = TIMES
) -> Check:
    """Compare losses in the order of `compared`."""
    found, plain, rounded = torch.tensor(losses, dtype=torch.float64)
    least = max(LEAST / 10, roundoff)
    return compared("loss", [(found, plain, rounded)], least, times=times)


def compare(
    plain: PlainStep, found: Step, roundoff: float, times: float = TIMES
) -> tuple[list[Check], list[str], list[str]]:
    """Compare the step `found` with the reference `plain`. Return the checks, the
    problems, and notes."""
    expected = plain.found.targets[0]
    apart = max(abs(count - expected) for count in found.targets)
    shown = " and ".join(sorted({str(count) for count in found.targets}))
    losses = found.loss, plain.found.loss, plain.rounded.loss
    checks = [
        compared_loss(losses, roundoff, times),
        Check("targets", shown, str(expected), apart, 0),
        _change(plain, found),
    ]
    modules = _modules(plain, found, max(LEAST, TIMES * roundoff), times)
    modules.sort(key=_excess, reverse=True)
    faults = [*_gradient_faults(plain, found), *wrong(checks)]
    if bad := [check for check in modules if not check.is_within]:
        faults.append(
            f"the gradients of {len(bad)} modules are wrong, most that of "
            f"{bad[0].name} (error {bad[0].error:.2g})"
        )
    return checks + modules[:SHOWN], faults, list(_notes(plain, modules))


def wrong(checks: list[Check]) -> list[str]:
    bad = (check for check in checks if not check.is_within)
    return [f"{c.name} is {c.found}, plain {c.plain}" for c in bad]


def _change(plain: PlainStep, found: Step) -> Check:
    """Compare the weight change of the step `found` with the change that a torch.optim
    optimizer makes with the same gradients, up to a few fp32 rounding errors."""
    after, values = plain.weights_after(found.gradients), []
    for name, weights in found.weights.items():
        before = plain.before[name]
        change = after[name] - before
        values.append((weights - before, change, change + ROUNDOFF["fp32"] * before))
    return compared("change of weights", values, 1e-3)


def _excess(check: Check) -> float:
    """Return how many times its tolerance an error is. NaN counts as infinite."""
    return math.inf if math.isnan(check.error) else check.error / check.tolerance


def _modules(plain: PlainStep, found: Step, least: float, times: float) -> list[Check]:
    """Compare the gradients of each module with the reference."""
    exact, own = plain.found.gradients, found.gradients
    size, checks = SMALL * _norm(exact.values()), []
    for module, names in groupby(exact, lambda name: name.rpartition(".")[0]):
        values = [
            (
                own.get(n, torch.zeros_like(exact[n])),
                exact[n],
                plain.rounded.gradients[n],
            )
            for n in names
        ]
        name = f"gradient {module}"
        checks.append(compared(name, values, least, size=size, times=times))
    return checks


def _notes(plain: PlainStep, modules: list[Check]) -> Iterator[str]:
    """Describe gradients in which no error can be detected, because they are zero or
    consist mostly of rounding errors. An example is the first matrix of an adapter,
    whose gradient is zero while the second matrix is zero."""
    if unsure := [c.name.partition(" ")[2] for c in modules if c.tolerance > UNSURE]:
        yield (
            f"a fault would not be seen in {len(unsure)} of {len(modules)} modules, "
            f"whose gradients are mostly rounding: {_some(unsure)}"
        )
    moved = {name for name, own in plain.found.gradients.items() if own.any()}
    if silent := sorted(plain.trained - moved):
        yield (
            f"{len(silent)} trainable parameters have a gradient of zero or none, here "
            f"and in plain PyTorch; no fault can be seen in them: {_some(silent)}"
        )


def _gradient_faults(plain: PlainStep, found: Step) -> Iterator[str]:
    if missing := sorted(plain.found.gradients.keys() - found.gradients.keys()):
        yield (
            f"{len(missing)} trainable parameters received no gradient: "
            f"{_some(missing)}"
        )
    more = found.gradients.keys() - plain.trained
    if extra := sorted(n for n in more if bool(found.gradients[n].any())):
        yield f"frozen parameters are trained: {_some(extra)}"
    if not found.ranks_agree:
        yield "the ranks have different weights after the step"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))
