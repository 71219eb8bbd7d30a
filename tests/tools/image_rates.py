# ruff: noqa: T201
"""Images a second of `kedro run --env=images` on JPEG files made here, beside a plain
loop of the same model whose data already lies on the device.

    python -m tests.tools.image_rates --images 10240 --batch 512 --steps 160 --trainer
    python -m tests.tools.image_rates --images 200 --size 32 --batch 16 --steps 6

The loop is at its best: channels last, bf16, the fused AdamW, compiled or not, and no
crops. flatout crops, mirrors and standardises; `pixels` were decoded once, `files` are
decoded at every epoch. `--trainer` adds the benchmark's headline: the Hugging Face
Trainer on the same decoded rows.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import AutoConfig, AutoModelForImageClassification

from tests.tools.image_loader import make_files

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
WARM_STEPS, WINDOW = 20, 20


def plain(name: str, given: argparse.Namespace, *, compiled: bool) -> float:
    """Images a second: the median of three windows of steps."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = AutoConfig.for_model(**MODELS[name], num_labels=10, image_size=given.size)
    last = {"device": device, "memory_format": torch.channels_last}
    model = AutoModelForImageClassification.from_config(config).to(**last)
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, fused=device.type == "cuda"
    )
    pixels = torch.randn(given.batch, 3, given.size, given.size).to(**last)
    labels = torch.randint(10, (given.batch,), device=device)

    def images_per_s(steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            with torch.autocast(device.type, torch.bfloat16):
                logits = forward(pixel_values=pixels).logits
            loss = nn.functional.cross_entropy(logits.float(), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        loss.item()
        return steps * given.batch / (time.perf_counter() - begin)

    images_per_s(min(WARM_STEPS, given.steps))
    return statistics.median(images_per_s(min(WINDOW, given.steps)) for _ in range(3))


def configured(folder: Path, name: str, keep: str, given: argparse.Namespace) -> Path:
    """A folder of configuration whose environment `images` trains this model."""
    conf = folder / f"conf_{keep}"
    shutil.rmtree(conf, ignore_errors=True)
    shutil.copytree("conf", conf, ignore=shutil.ignore_patterns("local", "tuned"))
    (conf / "local").mkdir()
    file = conf / "images/parameters.yml"
    settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    settings["images"] = {"size": given.size, "channels": 3, "keep": keep}
    shares = {"train": 0.8, "validation": 0.1, "test": 0.1}
    settings["split"] = {"fractions": shares}
    settings["model"] |= {"config": MODELS[name], "crop_area": 0.25}
    settings["model"]["flip_probability"] = 0.5
    settings["train"] |= {
        "global_batch_size": given.batch,
        "max_steps": given.steps,
        "epochs": 1000,
        "log_every": max(1, given.steps // 8),
        "evaluate_every": None,
        "learning_rate": 1e-4,
        "resume": "never",
        "distributed": {"num_processes": given.processes},
    }
    settings["guard"] = {"enabled": False}
    settings["tracking"] = {"log_model": False}
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return conf


def kedro(conf: Path, folder: Path, keep: str, pipelines: str, more: str = "") -> Path:
    """Run it; its folder of reports."""
    data = folder / f"data_{keep}"
    params = f"data_dir={data},images.path={folder / 'raw'}{more}"
    command = [sys.executable, "-m", "kedro", "run", "--env=images"]
    command += [f"--pipelines={pipelines}", f"--conf-source={conf}"]
    done = subprocess.run(
        [*command, f"--params={params}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        print((done.stdout + done.stderr)[-3_000:], flush=True)
    return data / "08_reporting"


def ours(folder: Path, name: str, keep: str, given: argparse.Namespace) -> None:
    conf = configured(folder, name, keep, given)
    for more in given.params or [""]:
        reports = kedro(conf, folder, keep, "images,train", more and f",{more}")
        file = reports / "train_report.json"
        report = json.loads(file.read_text()) if file.exists() else {}
        keys = ("loader_wait_pct", "mfu_pct", "compile", "cuda_graphs", "compile_s")
        keys += ("first_step_s", "peak_reserved_gib", "world_size")
        told = " ".join(f"{key} {report.get(key)}" for key in keys)
        rate = report.get("samples_per_s", 0)
        print(f"{name} flatout {keep} {more}: {rate:,.0f} images/s {told}", flush=True)
        file.unlink(missing_ok=True)


def headline(folder: Path, name: str, given: argparse.Namespace) -> None:
    """flatout and the Trainer, by the benchmark's own clock."""
    conf = configured(folder, name, "pixels", given)
    more = ",benchmark.mode=headline,benchmark.repeats=2"
    reports = kedro(conf, folder, "pixels", "benchmark", more)
    report = (reports / "benchmark_report.md").read_text(encoding="utf-8")
    print(f"{name}\n{report[:4_000]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=10_240)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--keep", nargs="*", default=["pixels", "files"])
    parser.add_argument("--params", nargs="+", help="of flatout's, each for a run")
    parser.add_argument("--no-plain", action="store_true")
    parser.add_argument("--trainer", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(folder / "raw", given.images)
        for model in given.models:
            for keep in given.keep:
                ours(folder, model, keep, given)
            for compiled in () if given.no_plain else (False, True):
                how = "compiled" if compiled else "eager"
                rate = plain(model, given, compiled=compiled)
                print(f"{model} plain {how}: {rate:,.0f} images/s", flush=True)
                torch._dynamo.reset()
            if given.trainer:
                headline(folder, model, given)


if __name__ == "__main__":
    main()
