"""Interface between a family and samples of a fixed shape (images, tables), which its
models accept instead of tokens. `Samples` is the one for models of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor


class Samples:
    """No samples: rows are tokens."""

    one_shape: ClassVar[bool] = False
    """True if all samples have one shape, so that a step is compiled as a whole."""
    batch_statistics: ClassVar[bool] = False
    """True if a sample's output depends on others in its batch (BatchNorm): then
    micro-batches are part of the optimisation, and a step has one."""

    def shape_keys(self, facts: Any) -> dict[str, Any]:
        """Config keys for the shape of samples, from the `facts` of the train split."""
        return {}

    def statistics_keys(self, facts: Any) -> dict[str, Any]:
        """Config keys for the means and deviations that standardise samples; a
        checkpoint keeps its own."""
        return {}

    def checkpoint_statistics(
        self, config: Any, name: str, **where: Any
    ) -> dict[str, Any]:
        """`statistics_keys` of a checkpoint that stores them in another file than its
        config. `where`: options of `from_pretrained`. Raises OSError and ValueError if
        that file cannot be loaded or read."""
        return {}

    def fault(self, config: Any) -> str | None:
        """Reason why a model of this config cannot accept samples of its own shape;
        None if it can."""
        return None

    def shape(self, config: Any) -> tuple[int, ...] | None:
        """Shape of one sample; None for tokens. Raises ValueError if the config lacks
        it."""
        return None

    def augment(self, config: Any, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Fields of a micro-batch after random augmentation, which the task drew from
        (seed, epoch, row)."""
        return batch

    def files_beside(self, config: Any) -> dict[str, Any]:
        """Contents of JSON files by name, saved with the weights for other programs."""
        return {}

    def count_products(self, model: Any) -> int | None:
        """Multiplications of one sample's forward pass; None if each matrix is used
        once per position."""
        return None
