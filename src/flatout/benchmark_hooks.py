"""A look at tuned parameters before they train."""

from __future__ import annotations

import logging
from typing import Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.pipeline.node import Node

from flatout.engine.settings import Settings, parse_settings

logger = logging.getLogger(__name__)


class TunedHooks:
    """Warns where tuned settings were measured on something else than this."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        self._settings = parse_settings(context.config_loader["parameters"])

    @hook_impl
    def before_node_run(self, node: Node, inputs: dict[str, Any]) -> None:
        if node.name != "train_model" or not self._settings.tuned:
            return
        differences = tuned_mismatches(self._settings, inputs["train_tokens"])
        if differences:
            logger.warning(
                "The tuned parameters were measured with another %s. They still train "
                "right, but may be slow: kedro run --pipelines=benchmark measures anew",
                "; another ".join(differences),
            )


def tuned_mismatches(settings: Settings, train_tokens: Any) -> list[str]:
    """What differs between where the tuned parameters were measured and here."""
    # They import torch, as training is about to.
    from flatout.engine.bench.recommend import mismatches, provenance
    from flatout.engine.environment import device_name
    from flatout.engine.jobs.job_files import token_key
    from flatout.engine.jobs.launch import resolve_processes
    from flatout.engine.tokens import TokenRows

    here = provenance(
        settings,
        device_name(),
        resolve_processes(settings.train.distributed),
        token_key(TokenRows.from_dataset(train_tokens)),
    )
    return mismatches(_sound(settings.tuned), here)


def _sound(tuned: dict[str, Any]) -> dict[str, Any]:
    """`tuned` without the key that is not as the benchmark writes it, after a
    warning."""
    versions = tuned.get("versions", {})
    if isinstance(versions, dict):
        return tuned
    logger.warning(
        "tuned.versions in conf/tuned/parameters.yml is %r, not a version by package: "
        "not compared; kedro run --pipelines=benchmark writes the file anew",
        versions,
    )
    return {key: value for key, value in tuned.items() if key != "versions"}
