"""The families of image models: ViT, ConvNeXt and ResNet.

Pixels are copied to the device as bytes, and then cropped, flipped and standardised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from flatout.engine.families._family import (
    ATTENTION,
    Family,
    FusePlan,
    Samples,
    Schedule,
)
from flatout.engine.families._modeling.crops import cropped
from flatout.engine.ops.folded_convolution import fold
from flatout.engine.ops.patches import replace_patches

PREPROCESSOR = "preprocessor_config.json"
LIGHTEST = 255
"""The largest value of a byte. transformers' image processors divide pixels by it."""


class _Images(Samples):
    one_shape = True

    def shape_keys(self, facts: Any) -> dict[str, Any]:
        return {"image_size": facts.shape[0], "num_channels": facts.shape[2]}

    def shape(self, config: Any) -> tuple[int, int, int]:
        """Return (height, width, channels). Raises ValueError if the config lacks the
        image size or the statistics, as it can if flatout did not train the model."""
        names = ("image_size", "image_mean", "image_std")
        if missing := [n for n in names if getattr(config, n, None) is None]:
            raise ValueError(
                f"its config.json has no {' and no '.join(missing)}: train from it "
                "(model.name_or_path), which stores them"
            )
        return config.image_size, config.image_size, config.num_channels

    def statistics_keys(self, facts: Any) -> dict[str, Any]:
        return {"image_mean": facts.mean, "image_std": facts.deviation}

    def checkpoint_statistics(
        self, config: Any, name: str, **where: Any
    ) -> dict[str, Any]:
        """Return the statistics in `preprocessor_config.json`, rescaled to bytes, or {}
        if there is no such file. Raises ValueError if it is invalid."""
        from transformers.utils import cached_file

        absent_is_none = {"_raise_exceptions_for_missing_entries": False}
        file = cached_file(name, PREPROCESSOR, **absent_is_none, **where)
        if file is None:
            return {}
        found = json.loads(Path(file).read_text(encoding="utf-8"))
        factor = found.get("rescale_factor", 1 / LIGHTEST)
        factor = factor if found.get("do_rescale", True) else 1.0
        plain = {"image_mean": 0.0, "image_std": 1.0}
        if found.get("do_normalize", True):
            plain = {key: found[key] for key in plain if key in found}
        channels = config.num_channels
        return {
            key: (np.broadcast_to(value, channels) / factor).tolist()
            for key, value in plain.items()
        }

    def extra_files(self, config: Any) -> dict[str, Any]:
        """Return the config of a transformers image processor that gives the same
        pixels as flatout. For greyscale images, return nothing, because transformers'
        pipelines always pass three channels."""
        if config.num_channels != len("RGB"):
            return {}
        size = config.image_size
        processor = {
            "image_processor_type": "BitImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"shortest_edge": size},
            "resample": 2,  # Pillow's code for bilinear
            "do_center_crop": True,
            "crop_size": {"height": size, "width": size},
            "do_rescale": True,
            "rescale_factor": 1 / LIGHTEST,
            "do_normalize": True,
            "image_mean": [value / LIGHTEST for value in config.image_mean],
            "image_std": [value / LIGHTEST for value in config.image_std],
        }
        return {PREPROCESSOR: processor}

    def augment(self, config: Any, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Apply the field `crops` (B, 5), if present, to `inputs` (B, H, W, C)."""
        if "crops" not in batch:
            return batch
        return {**batch, "inputs": cropped(batch["inputs"], batch["crops"])}

    def count_products(self, model: Any) -> int:
        """Count the multiplications of one image with FlopCounterMode. They cannot be
        counted from the weights, because a convolution is applied at many positions."""
        config, was_training = model.config, model.training
        shape = (1, config.num_channels, config.image_size, config.image_size)
        pixels = torch.zeros(shape, device=model.device)
        model.eval()
        try:
            with (
                torch.no_grad(),
                torch.compiler.set_stance("force_eager"),
                sdpa_kernel(SDPBackend.MATH),  # fused kernels are not always counted
                FlopCounterMode(display=False) as counter,
            ):
                model(pixel_values=pixels)
        finally:
            model.train(was_training)
        return int(counter.get_total_flops()) // 2


class _Patches(_Images):
    def fault(self, config: Any) -> str | None:
        """Return an error if the image size is not a multiple of the patch size."""
        if config.image_size % config.patch_size == 0:
            return None
        return (
            f"images of {config.image_size} pixels cannot be divided into patches of "
            f"{config.patch_size}: set images.size to a multiple of it, or "
            "model.config.patch_size"
        )


class _Stages(_Images):
    def fault(self, config: Any) -> str | None:
        """Return an error if images are too small for stages that halve them."""
        least = config.patch_size * 2 ** (config.num_stages - 1)
        if config.image_size >= least:
            return None
        return (
            f"images of {config.image_size} pixels are too small for "
            f"{config.num_stages} stages after patches of {config.patch_size}: set "
            f"images.size to at least {least}, or model.config.num_stages"
        )


class _Normed(_Images):
    batch_statistics = True


class _Vision(Family):
    samples: ClassVar[Samples] = _Images()
    schedule = Schedule(records_padded=True, records_unasked=False)

    def num_layers(self, config: Any) -> int:
        """Return the number of layers, summed over the stages if there are any."""
        stages = getattr(config, "depths", None)
        return sum(stages) if stages else super().num_layers(config)

    def inputs(
        self, config: Any, batch: Mapping[str, Tensor], max_length: int
    ) -> dict[str, Any]:
        """Standardise the bytes `inputs` (B, H, W, C). Return them as (B, C, H, W) with
        the memory format channels_last."""
        pixels = batch["inputs"].float()
        known = tuple(config.image_mean), tuple(config.image_std)
        mean, deviation = statistics(known, pixels.device)
        standard = (pixels - mean) / deviation
        return {"pixel_values": standard.permute(0, 3, 1, 2)}

    def fuse(self, model: Any, plan: FusePlan) -> dict[str, int]:
        """Replace the convolution over non-overlapping patches with a matmul."""
        replace_patches(model)
        return {}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def statistics(known: tuple[tuple[float, ...], ...], device: torch.device) -> Tensor:
    """Return the means and standard deviations (2, C) on `device`. The tensor is
    cached, because otherwise the host would wait for a copy at every step. Dynamo
    treats the result as a constant, and allows one such call per graph."""
    return _made_once(known, device)


@cache
def _made_once(known: tuple[tuple[float, ...], ...], device: torch.device) -> Tensor:
    return torch.tensor(known, device=device)


class VisionTransformer(_Vision):
    """The family of `vit` models: attention over image patches."""

    model_types = frozenset({"vit"})
    samples = _Patches()

    def fuse(self, model: Any, plan: FusePlan) -> dict[str, int]:
        """Replace the patch convolution, join query, key and value, and restrict the
        last layer to the first token."""
        from flatout.engine.families._modeling import vit_blocks

        super().fuse(model, plan)
        vit_blocks.narrow_to_first_token(model)
        return {ATTENTION: vit_blocks.fuse_attention(model)}


class ConvNext(_Vision):
    """The family of `convnext` and `convnextv2` models: convolutions with LayerNorm."""

    model_types = frozenset({"convnext", "convnextv2"})
    samples = _Stages()
    attends = False


class ResNet(_Vision):
    """The family of `resnet` models: convolutions with BatchNorm."""

    model_types = frozenset({"resnet"})
    samples = _Normed()
    attends = False

    def fuse(self, model: Any, plan: FusePlan) -> dict[str, int]:
        """Also fold the first convolution (folded_convolution.py)."""
        super().fuse(model, plan)
        fold(model.base_model.embedder.embedder.convolution)
        return {}
