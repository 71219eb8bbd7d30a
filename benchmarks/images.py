"""Compare the training of ViT-S/16 and ResNet-50 with a plain compiled loop.

    python -m benchmarks.images
    python -m benchmarks.images --small --turns 1

flatout reads decoded images, and crops, flips and normalises them. The plain loop does
none of this. Its images are already on the device.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.harness import Figures, Script, main
from benchmarks.projects import Project
from benchmarks.training import DEVICE, IS_CUDA, Shape, Stopwatch

MODELS: dict[str, dict[str, Any]] = {
    "ViT-S/16": {
        "model_type": "vit",
        "hidden_size": 384,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "intermediate_size": 1536,
        "patch_size": 16,
    },
    "ResNet-50": {"model_type": "resnet"},
}
SMALL: dict[str, dict[str, Any]] = {
    "ViT-S/16": {
        **MODELS["ViT-S/16"],
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    },
    "ResNet-50": {
        **MODELS["ResNet-50"],
        "embedding_size": 16,
        "hidden_sizes": [32, 64],
        "depths": [1, 1],
    },
}
CLASSES = 10


@dataclass(frozen=True)
class Job:
    """Images and settings of a training run."""

    config: dict[str, Any]
    images: int = 6_400
    size: int = 224
    """Height and width in pixels."""
    batch: int = 512
    steps: int = 600


def job_of(given: argparse.Namespace) -> Job:
    if given.small:
        return Job(SMALL[given.case], images=160, size=32, batch=16, steps=24)
    return Job(MODELS[given.case])


def write_images(folder: Path, job: Job) -> None:
    """Write JPEG files of random noise, with one folder per class."""
    from PIL import Image

    chance = np.random.default_rng(0)
    for number in range(job.images):
        place = folder / f"class_{number % CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        coarse = chance.integers(0, 256, (job.size // 8, job.size // 8, 3), np.uint8)
        image = Image.fromarray(coarse).resize((job.size, job.size))
        image.save(place / f"{number:05d}.jpg")


def flatout(given: argparse.Namespace) -> Figures:
    """Return images/s from the report of `kedro run`, without the warm-up."""
    job = job_of(given)
    parameters = {
        "images": {"size": job.size, "channels": 3},
        "model": {
            "task": "image-classification",
            "config": job.config,
            "crop_area": 0.25,
            "flip_probability": 0.5,
        },
        "train": {
            "rows": "images",
            "global_batch_size": job.batch,
            "max_steps": job.steps,
            "epochs": 100_000,
            "learning_rate": 1e-4,
            "log_every": max(1, job.steps // 12),
            "evaluate_every": None,
            "compile": IS_CUDA,
            "distributed": {"num_processes": 1},
        },
    }
    with tempfile.TemporaryDirectory(prefix="flatout-") as name:
        folder = Path(name)
        write_images(folder / "raw", job)
        project = Project.make(folder, "images", parameters)
        project.run("images,train", **{"images.path": folder / "raw"})
        report = project.report
    names = ("samples_per_s", "loader_wait_pct", "compile_s", "peak_reserved_gib")
    return {name: report.get(name) for name in names}


def plain(given: argparse.Namespace) -> Figures:
    """Measure a typical hand-written loop, whose images are already on the device. ViT
    gets no attention mask, because a mask prevents flash attention."""
    import transformers as hf
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    job = job_of(given)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    sizes = {"num_labels": CLASSES, "image_size": job.size}
    config = hf.AutoConfig.for_model(**job.config, **sizes)
    last: Any = {"device": DEVICE, "memory_format": torch.channels_last}
    model = hf.AutoModelForImageClassification.from_config(config).to(**last).train()
    if config.model_type == "vit":
        hf.AttentionInterface.register("unmasked", sdpa_attention_forward)
        hf.AttentionMaskInterface.register("unmasked", lambda *_, **__: None)
        model.set_attn_implementation("unmasked")
    forward = torch.compile(model) if IS_CUDA else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    pixels = torch.randn(job.batch, 3, job.size, job.size).to(**last)
    labels = torch.randint(CLASSES, (job.batch,), device=DEVICE)
    steps = max(4, job.steps // 12)
    watch = Stopwatch(Shape(job.config, job.batch, steps=steps, warm_steps=steps))
    done = False
    while not done:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=IS_CUDA):
            logits = forward(pixel_values=pixels).logits
        loss = nn.functional.cross_entropy(logits.float(), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        done = watch.step()
    return watch.figures()


SIDES = {"flatout": flatout, "plain compiled loop": plain}
SCRIPT = Script(
    "benchmarks.images",
    "images compared with a plain compiled loop",
    dict.fromkeys(MODELS, SIDES),
)

if __name__ == "__main__":
    raise SystemExit(main(SCRIPT))
