"""Images a second of flatout's loader beside PyTorch's, on JPEG files made here.

    python -m tests.tools.image_loader --images 2000 --workers 0 2

Three sides by turns, each a pass over all files: rows that hold pixels, rows that hold
files, and a DataLoader over a folder of classes as torchvision's ImageFolder reads it
(Pillow; shorter side to `size`, the middle kept; bytes, no standardising).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from flatout.engine.arrays.image_files import ImageFiles
from flatout.engine.arrays.recipes import array_recipes
from flatout.engine.batches.collation import Collator, StepRows
from flatout.engine.batches.global_batches import GlobalBatches, Planner
from flatout.engine.batches.loader import StepLoader
from flatout.engine.files.arrow_folder import write_recipe
from flatout.engine.machine.runtime import set_up
from flatout.engine.parameters import LoaderSettings, Settings, parse_settings
from flatout.engine.rows.layout import Layout
from flatout.engine.rows.opening import open_rows
from flatout.engine.tasks import make_task


def make_files(folder: Path, count: int) -> None:
    """Photos of 500 x 375, smooth as photos are, in ten classes."""
    with ProcessPoolExecutor() as pool:
        list(pool.map(partial(make_file, folder), range(count), chunksize=16))


def make_file(folder: Path, number: int) -> None:
    generator = np.random.default_rng(number)
    place = folder / f"class_{number % 10}"
    place.mkdir(parents=True, exist_ok=True)
    coarse = generator.integers(0, 256, (24, 32, 3)).astype(np.uint8)
    smooth = Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC)
    noise = generator.normal(0, 6, (375, 500, 3))
    pixels = (np.asarray(smooth) + noise).clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(place / f"{number:06d}.jpg", quality=90)


class PlainFolder(Dataset):
    """As torchvision.datasets.ImageFolder, with Resize, CenterCrop, PILToTensor."""

    def __init__(self, folder: Path, size: int) -> None:
        self.files = sorted(folder.rglob("*.jpg"))
        names = sorted({file.parent.name for file in self.files})
        self.numbers = {name: number for number, name in enumerate(names)}
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        file, size = self.files[row], self.size
        with Image.open(file) as opened:
            image = opened.convert("RGB")
        share = size / min(image.size)
        wide, high = (max(size, round(share * side)) for side in image.size)
        image = image.resize((wide, high), Image.Resampling.BILINEAR)
        left, top = (wide - size) // 2, (high - size) // 2
        image = image.crop((left, top, left + size, top + size))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return pixels, self.numbers[file.parent.name]


def settings_of(size: int, keep: str) -> Settings:
    return parse_settings(
        {
            "runtime": {"precision": "fp32"},
            "images": {"size": size, "keep": keep},
            "model": {"task": "image-classification", "config": {"model_type": "vit"}},
            "train": {"rows": "images"},
        }
    )


def rows_of(raw: Path, folder: Path, size: int, keep: str) -> tuple[StepRows, float]:
    """Steps over the train split, and the seconds that making its rows took."""
    settings, began = settings_of(size, keep), time.perf_counter()
    source = ImageFiles.of(raw, settings.split, settings.images)
    made = array_recipes("images", source, settings.split, settings.model)
    made["train"].prepare(folder)
    write_recipe(folder / keep, made["train"])
    task = make_task(settings.model, made["label_names"])
    rows = open_rows(folder / keep)
    planner = Planner("fixed", 4096, 1)
    batches = GlobalBatches(len(rows), 64, 0)
    steps = StepRows(rows, batches, planner, Collator(task, Layout()))
    return steps, time.perf_counter() - began


def ours(data: StepRows, workers: int) -> float:
    """Images a second of one pass."""
    settings = LoaderSettings(num_workers=workers)
    runtime = set_up(settings_of(8, "pixels").runtime)
    loader = StepLoader(data, settings, runtime, 0, len(data))
    return rate(lambda: sum(batch.num_samples for batch in loader))


def plain(folder: Dataset, workers: int) -> float:
    """The same of PyTorch's own loader."""
    loader = DataLoader(folder, 64, shuffle=True, num_workers=workers)
    return rate(lambda: sum(len(labels) for _, labels in loader))


def rate(work: Callable[[], int]) -> float:
    began = time.perf_counter()
    return work() / (time.perf_counter() - began)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=2_000)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--turns", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(folder / "raw", asked.images)
        sides = {}
        for keep in ("pixels", "files"):
            sides[keep], took = rows_of(folder / "raw", folder, asked.size, keep)
            size = sum(f.stat().st_size for f in (folder / keep).rglob("*"))
            say(f"rows of {keep}: made in {took:.1f} s, {size / 2**20:.0f} MiB")
        say(f"{os.cpu_count()} cores; images/s, median of {asked.turns} turns")
        others = PlainFolder(folder / "raw", asked.size)
        for workers in asked.workers:
            found: dict[str, list[float]] = {"pixels": [], "files": [], "folder": []}
            for _ in range(asked.turns):
                for keep, data in sides.items():
                    found[keep].append(ours(data, workers))
                found["folder"].append(plain(others, workers))
            middle = {name: statistics.median(values) for name, values in found.items()}
            shares = {n: v / middle["folder"] for n, v in middle.items()}
            told = (f"{n} {v:,.0f} ({shares[n]:.2f}x)" for n, v in middle.items())
            say(f"{workers} workers: {', '.join(told)}")


if __name__ == "__main__":
    main()
