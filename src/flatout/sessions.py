"""Kedro sessions inside somebody else's launcher (torchrun, accelerate, Slurm).

Such a launcher starts the whole command once a rank. Rank 0 runs it as ever; the
others run no node, no hook and save nothing: they wait for rank 0's training, become
ranks of it, and end with it.
"""

from __future__ import annotations

from typing import Any

from kedro.framework.session import KedroSession

from flatout.engine.environment import current_ranks, launched_from_outside


class MainRankSession(KedroSession):
    """Of rank 0."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        from flatout.engine.jobs.followers import release_followers

        try:
            return super().run(*args, **kwargs)
        finally:
            release_followers()


class FollowerSession(KedroSession):
    """Of every other rank."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        from flatout.engine.jobs.followers import follow

        follow()
        return {}


def session_class() -> type[KedroSession]:
    """The one that fits the place of this process among its launcher's."""
    if not launched_from_outside() or current_ranks().world_size == 1:
        return KedroSession
    return MainRankSession if current_ranks().is_main else FollowerSession
