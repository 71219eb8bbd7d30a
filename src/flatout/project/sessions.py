"""Kedro sessions of the project, with support for external launchers.

Launchers such as torchrun, accelerate and Slurm start the whole command once per rank.
Rank 0 runs the command as usual. The other ranks run no nodes or hooks and save no
outputs. They wait until rank 0 starts training, join the training run, and exit when
the training ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kedro.framework.context import KedroContext
from kedro.framework.project import pipelines
from kedro.framework.session import KedroSession

from flatout.engine.machine.environment import current_ranks, launched_from_outside
from flatout.places import use_project
from flatout.project.command_line import check_pipelines
from flatout.project.config_loader import loader_of
from flatout.project.fitting import fit_pipelines

NODES = ("node_names", "from_nodes", "to_nodes")
"""Run options whose values are node names."""


class ProjectSession(KedroSession):
    """Session that runs the pipelines in the parameter `pipelines` by default."""

    _context: KedroContext | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        use_project(kwargs.get("project_path"))
        super().__init__(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("pipeline_name") or kwargs.get("pipeline_names")
        if not args and not asked:
            kwargs["pipeline_names"] = self._named_pipelines() or None
        for option in NODES:
            if kwargs.get(option):
                kwargs[option] = self.full_names(kwargs[option], kwargs)
        try:
            return super().run(*args, **kwargs)
        finally:
            if is_launched():
                from flatout.engine.launch.followers import release_followers

                release_followers()

    def full_names(self, given: Iterable[str], asked: Mapping[str, Any]) -> list[str]:
        """Return the node names in `given` with their namespaces, e.g.
        `split.split_rows`. `asked` are the arguments of `run`. Names that are not in
        the requested pipelines are returned unchanged."""
        names = asked.get("pipeline_names") or [asked.get("pipeline_name")]
        pipelines.set_requested([name for name in names if name] or None)
        self.load_context()
        chosen = [pipelines[name or "__default__"] for name in names]
        full = {node.short_name: node.name for one in chosen for node in one.nodes}
        return [full.get(name, name) for name in given]

    def _named_pipelines(self) -> list[str]:
        settings = loader_of(self.load_context()).settings
        check_pipelines(settings.pipelines, "parameter pipelines")
        if settings.pipelines:  # Kedro reloads all pipelines if the names change
            pipelines.set_requested(settings.pipelines)
            fit_pipelines(settings)
        return settings.pipelines

    def load_context(self) -> KedroContext:
        """Return the session's context, which is created only once."""
        self._context = self._context or super().load_context()
        return self._context


class FollowerSession(KedroSession):
    """Session of a rank other than rank 0, which only joins the training run."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        from flatout.engine.launch.followers import follow

        follow()
        return {}


def is_launched() -> bool:
    """Return whether an external launcher has started several ranks."""
    return launched_from_outside() and current_ranks().world_size > 1


def session_class() -> type[KedroSession]:
    """Return FollowerSession if this is a launched rank other than 0, else
    ProjectSession."""
    is_follower = is_launched() and not current_ranks().is_main
    return FollowerSession if is_follower else ProjectSession
