"""A checkpoint whose head is not the task's: the body stays, the head is new.

transformers refuses a head of another size (three labels then, four now) with a
RuntimeError, and takes one of another kind with a table in the log.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


class BodyMismatch(ValueError):
    """Weights below the head that have another shape than the config says."""


def load_with_new_head(auto: Any, name: str, **options: Any) -> Any:
    """`auto.from_pretrained`; says once which weights start from scratch. Raises
    BodyMismatch, and what transformers raises."""
    model, info = auto.from_pretrained(
        name, ignore_mismatched_sizes=True, output_loading_info=True, **options
    )
    prefix = f"{model.base_model_prefix}."
    changed = {key: (then, now) for key, then, now in info["mismatched_keys"]}
    body = sorted(key for key in changed if key.startswith(prefix))
    if body:
        then, now = (tuple(shape) for shape in changed[body[0]])
        raise BodyMismatch(
            f"{body[0]} is {then} in the checkpoint and {now} by its config "
            f"({len(body)} weights differ so): take sizes out of model.overrides"
        )
    new = sorted({*changed, *info["missing_keys"]})
    if new:
        logger.warning(
            "not in %s, so they start from scratch: %s", name, ", ".join(new)
        )
    return model
