"""Comparison of two steps, and its result as a table and a sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.engine.answers.plain_step import Step

ROUNDOFF = {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Half the distance from 1 to the next number."""
LEAST = 1e-4
"""Tolerance of gradients in fp32: sums in another order."""
TIMES = 4
"""Tolerated error, in units of roundoff and of the error of rounding alone."""
SMALL = 1e-3
"""Share of the gradient's norm below which a module's own norm does not count."""
SHOWN = 5
UNSURE = 0.5
"""Tolerance of a gradient from which on it is not judged."""


def floor_of(precision: str, *, tf32: bool) -> float:
    """Return the relative error of a gradient that is always tolerated."""
    name = "tf32" if tf32 and precision == "fp32" else precision
    return max(LEAST, TIMES * ROUNDOFF[name])


@dataclass(frozen=True)
class Pair:
    """Two steps on the same rows."""

    found: Step
    plain: Step
    rounded: Step
    """The plain step in the precision of the run."""
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    """Weights after a plain update by the gradients of `found`."""


@dataclass(frozen=True)
class Check:
    """A figure and the plain one."""

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
    """Result of a comparison; can be sent as JSON."""

    step: str
    reference: str
    checks: list[Check]
    modules: list[Check]
    """Gradients by module, the worst ones."""
    faults: list[str]
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    subject: str = "the step is that"

    @property
    def is_sound(self) -> bool:
        return not self.faults

    @property
    def sentence(self) -> str:
        if self.is_sound:
            return f"Verdict: sound, {self.subject} of plain PyTorch but for rounding."
        more = len(self.faults) - 1
        rest = f" (and {more} more below)" if more else ""
        return f"Verdict: NOT sound, {self.faults[0]}{rest}."

    def lines(self) -> list[str]:
        """Return the text for a console."""
        rows = [*self.checks, *self.modules]
        width = max((len(row.name) for row in rows), default=0)
        table = [
            f"  {row.name:{width}}  {row.found:>12}  {row.plain:>12}  "
            f"{row.error:9.1e}  {row.tolerance:9.1e}  "
            f"{'ok' if row.is_within else 'WRONG'}"
            for row in rows
        ]
        head = f"  {'':{width}}  {'flatout':>12}  {'plain':>12}  "
        return [
            self.step,
            f"compared with {self.reference}",
            f"{head}{'error':>9}  {'tolerated':>9}",
            *table,
            *self.notes,
            *self.faults[1:],
            f"{self.sentence} ({self.seconds:.0f} s)",
        ]

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Verdict:
        made = {n: [Check(**c) for c in fields[n]] for n in ("checks", "modules")}
        return cls(**{**fields, **made})


def compare(pair: Pair, facts: Mapping[str, Any]) -> Verdict:
    """`facts`: step, reference, floor and noise (factor of the rounding's error)."""
    floor, noise = facts["floor"], TIMES * facts["noise"]
    modules = _modules(pair, floor, noise)
    checks = [_loss(pair, floor, noise), _targets(pair), _divisor(pair), _weights(pair)]
    faults = _wrong(checks)
    wrong = [c for c in modules if not c.is_within]
    if wrong:
        faults.append(
            f"the gradients of {len(wrong)} modules are wrong, most that of "
            f"{wrong[0].name} (error {wrong[0].error:.2g})"
        )
    faults = [*_gradient_faults(pair), *faults]
    notes = _unsure(modules)
    silent = sorted(pair.plain.trained - pair.plain.gradients.keys())
    if silent:
        notes.append(
            f"{len(silent)} trainable parameters get no gradient from this loss, here "
            f"and in plain PyTorch: {_some(silent)}"
        )
    zero = sorted(n for n, g in pair.plain.gradients.items() if not g.any())
    if zero:  # the first matrix of an adapter, while its second one is zero
        notes.append(
            f"{len(zero)} parameters have a gradient of zero in this step, in which no "
            f"fault can be seen: {_some(zero)}"
        )
    step, reference = facts["step"], facts["reference"]
    return Verdict(step, reference, checks, modules[:SHOWN], faults, notes)


def judged(subject: str, step: str, reference: str, checks: list[Check]) -> Verdict:
    """Return the verdict of checks alone. `subject`: plural."""
    faults = _wrong(checks)
    return Verdict(step, reference, checks, [], faults, subject=f"{subject} are those")


def _wrong(checks: list[Check]) -> list[str]:
    wrong = (check for check in checks if not check.is_within)
    return [f"{c.name} is {c.found}, plain {c.plain}" for c in wrong]


def _unsure(modules: list[Check]) -> list[str]:
    """Tell of gradients that are mostly rounding, in which no fault can be seen."""
    unsure = [c.name.partition(" ")[2] for c in modules if c.tolerance > UNSURE]
    if not unsure:
        return []
    return [
        f"a fault would not be seen in {len(unsure)} of {len(modules)} modules, whose "
        f"gradients are mostly rounding: {_some(unsure)}"
    ]


def _gradient_faults(pair: Pair) -> list[str]:
    found, plain, faults = pair.found, pair.plain, []
    if missing := sorted(plain.gradients.keys() - found.gradients.keys()):
        faults.append(
            f"{len(missing)} trainable parameters received no gradient: "
            f"{_some(missing)}"
        )
    more = (found.trained - plain.trained) & found.gradients.keys()
    if extra := sorted(n for n in more if bool(found.gradients[n].any())):
        faults.append(f"frozen parameters are trained: {_some(extra)}")
    if not found.ranks_agree:
        faults.append("the ranks have different weights after the step")
    if not found.finite:
        faults.append("loss or gradient is not finite")
    return faults


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _loss(pair: Pair, floor: float, noise: float) -> Check:
    found, plain = pair.found.loss, pair.plain.loss
    size = max(abs(plain), 1e-12)
    rounding = abs(pair.rounded.loss - plain) / size
    least = floor / TIMES if floor > LEAST else LEAST / 10
    tolerance = max(least, noise * rounding)
    error = abs(found - plain) / size
    return Check("loss", f"{found:.6f}", f"{plain:.6f}", error, tolerance)


def _targets(pair: Pair) -> Check:
    found, (plain,) = pair.found.targets, pair.plain.targets
    error = max(abs(count - plain) for count in found)
    shown = " and ".join(sorted({str(count) for count in found}))
    return Check("targets", shown, str(plain), error, 0)


def _divisor(pair: Pair) -> Check:
    found, plain = pair.found.divisor, pair.plain.divisor
    error = abs((found or 1.0) - plain) / plain
    return Check("divisor of the loss", f"{found:.6g}", f"{plain:.6g}", error, 1e-6)


def _weights(pair: Pair) -> Check:
    """Compare changes of weights; what fp32 rounds of a weight is tolerated."""
    before = list(pair.before.values())
    own, plain = (
        [w[name] - b for name, b in pair.before.items()]
        for w in (pair.found.weights, pair.after)
    )
    size = _norm(plain) or 1.0
    tolerance = 1e-3 + TIMES * ROUNDOFF["fp32"] * _norm(before) / size
    shown = f"{_norm(own):.6f}", f"{_norm(plain):.6f}"
    return Check("change of weights", *shown, _apart(own, plain) / size, tolerance)


def _modules(pair: Pair, floor: float, noise: float) -> list[Check]:
    """Return the error of the gradient by module, worst first."""
    plain = pair.plain.gradients
    total = _norm(plain.values())
    groups: dict[str, list[str]] = {}
    for name in plain:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    found = []
    for module, names in groups.items():
        zero = [torch.zeros_like(plain[n]) for n in names]
        own = [pair.found.gradients.get(n, z) for n, z in zip(names, zero, strict=True)]
        rounded = [pair.rounded.gradients[n] for n in names]
        theirs = [plain[n] for n in names]
        size = max(_norm(theirs), SMALL * total) or 1.0
        tolerance = max(floor, noise * _apart(rounded, theirs) / size)
        norms = f"{_norm(own):.6f}", f"{_norm(theirs):.6f}"
        error = _apart(own, theirs) / size
        found.append(Check(f"gradient {module}", *norms, error, tolerance))
    return sorted(found, key=lambda c: -_ratio(c))


def _ratio(check: Check) -> float:
    return math.inf if math.isnan(check.error) else check.error / check.tolerance


def _norm(tensors: Any) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def _apart(one: list[Tensor], other: list[Tensor]) -> float:
    return _norm([a - b for a, b in zip(one, other, strict=True)])
