"""What a family tells of samples of a fixed shape (images, tables) that its models take
in place of tokens. `Samples` itself is that of models of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor


class Samples:
    """None: rows are tokens."""

    one_shape: ClassVar[bool] = False
    """Whether all samples have one shape, for which a step is compiled as a whole."""
    batch_statistics: ClassVar[bool] = False
    """Whether a sample's output depends on the others of its batch (BatchNorm): then
    micro-batches are part of the optimisation, and a step is one of them."""

    def shape_keys(self, facts: Any) -> dict[str, Any]:
        """What a config must say of a sample's shape, by the `facts` of train."""
        return {}

    def statistics_keys(self, facts: Any) -> dict[str, Any]:
        """Means and deviations that the model standardises samples by; a checkpoint
        keeps its own."""
        return {}

    def checkpoint_statistics(
        self, config: Any, name: str, **where: Any
    ) -> dict[str, Any]:
        """`statistics_keys` of a checkpoint whose config does not say them, but another
        of its files. `where`: options of `from_pretrained`. Raises OSError and
        ValueError if that file cannot be had or read."""
        return {}

    def fault(self, config: Any) -> str | None:
        """Why a model of this config cannot take samples of the shape that it names;
        None if it can."""
        return None

    def shape(self, config: Any) -> tuple[int, ...] | None:
        """Of one sample; None of tokens. Raises ValueError if the config does not say
        it."""
        return None

    def augment(self, config: Any, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A micro-batch's fields as training changes them: by chance, as the task drew
        it from (seed, epoch, row)."""
        return batch

    def files_beside(self, config: Any) -> dict[str, Any]:
        """JSON files by name, saved with the weights for those who load them."""
        return {}

    def count_products(self, model: Any) -> int | None:
        """Multiplications of one sample's forward pass, if they are not those of each
        matrix once a place; None: they are."""
        return None
