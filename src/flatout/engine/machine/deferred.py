"""A function whose module is imported when it is called, not when its name is.

SciPy is 0.35 CPU seconds of a start
(docs/log.md).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class _Deferred(ModuleType):
    """In place of a module, until anything else of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.real(), name)

    def real(self) -> ModuleType:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return import_module(self.__name__)


@contextmanager
def deferred(module: str, function: str) -> Iterator[None]:
    """Inside, `from module import function` costs nothing; what it gives imports
    `module` when it is called. Without effect where that is imported or missing."""
    parent = module.rpartition(".")[0]
    spec = None
    if module not in sys.modules and find_spec(parent) is not None:
        spec = find_spec(module)
    if spec is None:
        yield
        return
    stand_in = _Deferred(module)
    stand_in.__path__ = list(spec.submodule_search_locations or [])

    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(stand_in.real(), function)(*arguments, **options)

    call.__name__ = function
    setattr(stand_in, function, call)
    sys.modules[module] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(module) is stand_in:
            del sys.modules[module]
