"""The entry `this_run`: environment and parameters of a command, for a sweep."""

from __future__ import annotations

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import DataCatalog, MemoryDataset

from flatout.project.parameters.hooks import loader_of


class ThisRunHooks:
    """Tells a sweep its own environment and parameters."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        self._this_run = loader_of(context).this_run()

    @hook_impl
    def after_catalog_created(self, catalog: DataCatalog) -> None:
        catalog["this_run"] = MemoryDataset(data=self._this_run)
