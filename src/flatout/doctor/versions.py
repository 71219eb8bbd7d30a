"""Check that the installed packages have versions that flatout supports."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from flatout.engine.machine.checks import Finding

SHOWN = ("torch", "transformers", "kedro", "mlflow")
INSTALL = "pip install -c requirements.lock -e ."


def versions() -> Finding:
    """Check the versions of Python and of all packages that flatout requires."""
    try:
        facts = metadata.metadata("flatout")
    except metadata.PackageNotFoundError:
        return Finding("versions", "warn", "flatout is not installed here", INSTALL)
    python = facts["Requires-Python"] if "Requires-Python" in facts else ""
    return judge(python, metadata.requires("flatout") or [])


def judge(python: str, requirements: Iterable[str]) -> Finding:
    """Return a finding about the installed versions. `python` is the range of supported
    Python versions. `requirements` are those in the metadata of the package."""
    here = platform.python_version()
    faults = []
    if not SpecifierSet(python).contains(here, prereleases=True):
        faults.append(f"Python {here}, needed {python}")
    for text in requirements:
        faults += _fault(Requirement(text))
    if faults:
        return Finding("versions", "fail", "; ".join(faults), INSTALL)
    shown = ", ".join(f"{name} {version_of(name)}" for name in SHOWN)
    return Finding("versions", "ok", f"Python {here}, {shown}")


def _fault(wanted: Requirement) -> list[str]:
    if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
        return []
    found = version_of(wanted.name)
    if found is None:
        return [f"{wanted.name} is not installed, needed {wanted.specifier}"]
    if not wanted.specifier.contains(found, prereleases=True):
        return [f"{wanted.name} {found}, needed {wanted.specifier}"]
    return []


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
