# ruff: noqa: T201
"""Images a second of flatout, the Hugging Face Trainer and a plain loop, side by side.

    python -m tests.tools.image_rates --images 6400 --batch 512
    python -m tests.tools.image_rates --images 200 --size 32 --batch 16 --window 2

JPEG files made here are decoded once. flatout and the Trainer read the same rows
through their loaders, crop, mirror and standardise. The Trainer has its best flags,
compiled or not. The plain loop's pixels already lie on the device: channels last, bf16,
the fused AdamW, compiled, no crops, and no mask in its attention. `flatout-files`
decodes files at every epoch.

A side may try ways: `flatout+graphs` records steps as CUDA graphs,
`flatout+algorithms` lets cuDNN try all of its algorithms, `flatout+products` makes
convolutions of one pixel products, `flatout+tuned` has Inductor try more block sizes.
`flatout+without-stem`, `-pool` and `-gelu` leave a part as the model has it.

All sides compile at once, each in a process. Then they take their windows one at a
time, in `--rounds`; before each, cuDNN chooses its algorithms again on a device that
nobody else uses, and a loader's ready batches are used up. A side that is refused, or
fails three times, is told of and waited for no longer.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageClassification

from flatout.engine.arrays.image_files import ImageFiles
from flatout.engine.arrays.recipes import array_recipes
from flatout.engine.batches.loader import StepLoader
from flatout.engine.benchmark.measuring.driver import Driver
from flatout.engine.benchmark.peers.flags import flags_of
from flatout.engine.benchmark.peers.trainer import _built, _fed, _trainer
from flatout.engine.files.arrow_folder import write_recipe
from flatout.engine.machine.runtime import set_up
from flatout.engine.models.flops import ModelFlops, peak_tflops
from flatout.engine.parameters import Settings, parse_settings
from flatout.engine.rows.opening import open_rows
from flatout.engine.train.setup.assemble import assemble
from flatout.engine.train.setup.job import TrainJob
from flatout.engine.train.step import _StepGraphs
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
SIDES = ["plain", "flatout", "trainer", "trainer-compiled"]
WINDOWS, FIRST_STEPS, SETTLING, READY = 3, 3, 8, 36
REPEATED = 50
CLASSES = tuple(f"class_{number}" for number in range(10))
IS_CUDA = torch.cuda.is_available()


class Turns:
    """Told of each step; True when it is enough."""

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        self.name, self.given = name, given
        self.folder = given.folder / "turns"
        self.folder.mkdir(exist_ok=True)
        self.steps = self.round = 0
        self.samples, self.wait_s, self.began = 0, 0.0, time.perf_counter()
        self.rates: list[float] = []
        self.waits: list[float] = []
        self.first_s = 0.0
        self.on_round: Callable[[], None] = lambda: None
        ready = READY if IS_CUDA else 2
        self.lead = FIRST_STEPS + (SETTLING if name.endswith("plain") else ready)

    def step_done(self, samples: int, wait_s: float = 0.0) -> bool:
        self.steps += 1
        self.samples += samples
        self.wait_s += wait_s
        if not self.round:
            if self.steps < FIRST_STEPS:
                return False
            self._next_round()
        behind = self.steps - self.lead
        if behind >= 0 and behind % self.given.window == 0:
            self._mark(is_first=not behind)
        if behind < WINDOWS * self.given.window:
            return False
        if self.round < self.given.rounds:
            self._next_round()
            return False
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        return True

    def _mark(self, *, is_first: bool) -> None:
        synchronize()
        now = time.perf_counter()
        if not is_first:
            self.rates.append(self.samples / (now - self.began))
            self.waits.append(100 * self.wait_s / (now - self.began))
        self.samples, self.wait_s, self.began = 0, 0.0, now

    def _next_round(self) -> None:
        """Wait for the others, and for the device."""
        synchronize()
        self.first_s = self.first_s or time.perf_counter() - self.began
        if IS_CUDA:
            torch.cuda.empty_cache()
        if self.round:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        (self.folder / f"{self.round}-{self.name}").touch()
        while len(list(self.folder.glob(f"{self.round}-*"))) < self.given.count:
            if time.time() > self.given.until + 80 * self.round:
                break
            time.sleep(0.1)
        self._lock = (self.folder / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        choose_again()
        self.on_round()
        self.round += 1
        self.steps = FIRST_STEPS

    def tell(self, more: str = "") -> None:
        rate, wait = statistics.median(self.rates), statistics.median(self.waits)
        windows = " ".join(f"{r:,.0f}" for r in self.rates)
        print(
            f"{self.name}: {rate:,.0f} images/s, wait {wait:.1f} %, windows {windows}, "
            f"first steps {self.first_s:.0f} s {more}",
            flush=True,
        )


def choose_again() -> None:
    """Convolutions of bf16 have no use for TF32, but cuDNN's choice is kept by it."""
    cudnn: Any = torch.backends.cudnn
    try:
        cudnn.allow_tf32 = not cudnn.allow_tf32
    except RuntimeError:  # the Trainer has set convolutions by their newer name
        now = cudnn.conv.fp32_precision
        cudnn.conv.fp32_precision = "ieee" if now == "tf32" else "tf32"


def synchronize() -> None:
    if IS_CUDA:
        torch.cuda.synchronize()


def plain(model_name: str, given: argparse.Namespace, turns: Turns) -> None:
    """A loop as one writes it by hand, compiled, its data on the device."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("unmasked", sdpa_attention_forward)
    AttentionMaskInterface.register("unmasked", lambda *_, **__: None)
    device = torch.device("cuda" if IS_CUDA else "cpu")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    config = AutoConfig.for_model(
        **MODELS[model_name], num_labels=10, image_size=given.size
    )
    last = {"device": device, "memory_format": torch.channels_last}
    model = AutoModelForImageClassification.from_config(config).to(**last)
    if config.model_type == "vit":
        model.set_attn_implementation("unmasked")
    forward = torch.compile(model)
    options = {"fused": True} if IS_CUDA else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **options)
    pixels = torch.randn(given.batch, 3, given.size, given.size).to(**last)
    labels = torch.randint(10, (given.batch,), device=device)
    done = False
    while not done:
        with torch.autocast(device.type, torch.bfloat16):
            logits = forward(pixel_values=pixels).logits
        loss = nn.functional.cross_entropy(logits.float(), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        done = turns.step_done(given.batch)
    turns.tell()


WITHOUT = {
    "stem": "_modeling.resnet_stem.fold_stem",
    "pool": "_modeling.resnet_stem.rectify_pool",
    "gelu": "_modeling.vit_feed_forward.fuse_feed_forward",
}
"""Functions that put a part in place, in flatout.engine.families."""


def set_ways(ways: list[str]) -> None:
    """Of compiling, of cuDNN and of fused parts; "graphs" is a parameter."""
    from torch._inductor import config

    for way in ways:
        if way.startswith("without-"):
            place, name = WITHOUT[way.removeprefix("without-")].rsplit(".", 1)
            module = import_module(f"flatout.engine.families.{place}")
            setattr(module, name, lambda *_: 0)
    if "algorithms" in ways:
        torch.backends.cudnn.benchmark_limit = 0
    if "products" in ways:
        config.conv_1x1_as_mm = True
    if "tuned" in ways:
        config.coordinate_descent_tuning = True


def settings_of(model_name: str, keep: str, given: argparse.Namespace) -> Settings:
    graphs = bool(given.side) and "+graphs" in given.side
    return parse_settings(
        {
            "runtime": {"precision": "bf16" if IS_CUDA else "fp32"},
            "split": {"fractions": {"train": 0.9, "validation": 0.05, "test": 0.05}},
            "images": {"size": given.size, "channels": 3, "keep": keep},
            "model": {
                "task": "image-classification",
                "config": MODELS[model_name],
                "crop_area": 0.25,
                "flip_probability": 0.5,
            },
            "train": {
                "rows": "images",
                "global_batch_size": given.batch,
                "token_budget": given.batch,  # what is free depends on the others
                "max_steps": 100_000,
                "epochs": 1_000_000,
                "log_every": 50,
                "evaluate_every": None,
                "error_analysis_every": None,
                "learning_rate": 1e-4,
                "resume": "never",
                "cuda_graphs": graphs or "auto",
                "distributed": {"num_processes": 1},
            },
        }
    )


def job_of(model_name: str, keep: str, given: argparse.Namespace) -> TrainJob:
    """An epoch has as many rows as a large data set's, the same ones over and over, in
    whole batches: its end would come every few steps."""
    rows = [open_rows(given.folder / keep / name) for name in ("train", "test")]
    whole = len(rows[0]) // given.batch * given.batch
    facts = replace(rows[0].facts, num_rows=whole * REPEATED)
    repeated = pa.concat_tables([rows[0].table.slice(0, whole)] * REPEATED)
    rows[0] = type(rows[0])(repeated)
    rows[0].__dict__["facts"] = facts
    settings = settings_of(model_name, keep, given)
    place = given.folder / f"{model_name.replace('/', '')}-{given.side}"
    place.mkdir(exist_ok=True)
    places = place / "run", place / "metrics.jsonl"
    return TrainJob(settings, rows[0], rows[1], rows[1], None, CLASSES, *places, "k")


def decode(keep: str, given: argparse.Namespace) -> None:
    settings, began = settings_of("ResNet-50", keep, given), time.perf_counter()
    source = ImageFiles.of(given.folder / "raw", settings.split, settings.images)
    made = array_recipes("images", source, settings.split, settings.model)
    made["train"].prepare(given.folder)
    for name in ("train", "test"):
        (given.folder / keep).mkdir(exist_ok=True)
        write_recipe(given.folder / keep / name, made[name])
    print(f"rows of {keep}: {time.perf_counter() - began:.1f} s", flush=True)


def flatout(job: TrainJob, turns: Turns) -> None:
    runtime = set_up(job.settings.runtime)
    trainer = assemble(job, runtime)
    trainer.model.train()
    settings = job.settings.train.loader
    loader = StepLoader(trainer.data, settings, runtime, 0, trainer.total_steps)
    driver = Driver(trainer)
    if trainer.resolved.cuda_graphs:  # recorded anew, with the algorithms chosen then
        stepper = trainer.stepper
        turns.on_round = lambda: setattr(stepper, "_graphs", _StepGraphs(stepper))
    for batch in loader:
        driver.step(batch, loader.wait_s)
        if turns.step_done(batch.num_samples, loader.wait_s):
            break
    flops = ModelFlops.of(trainer.model.model).over(1, 1, 0)
    peak = peak_tflops(runtime.device_name) or float("nan")
    share = 100 * statistics.median(turns.rates) * flops / (peak * 1e12)
    memory = torch.cuda.max_memory_reserved() / 2**30 if IS_CUDA else 0
    resolved = trainer.resolved
    turns.tell(
        f"{share:.1f} % of {peak} TFLOP/s, {loader.num_workers} workers, "
        f"compile {resolved.compile} graphs {resolved.cuda_graphs} {memory:.1f} GiB"
    )


def one(given: argparse.Namespace) -> None:
    model_name, side = given.models[0], given.side
    turns = Turns(f"{model_name} {side}".replace("/", ""), given)
    if side == "plain":
        plain(model_name, given, turns)
        return
    keep = "files" if side == "flatout-files" else "pixels"
    job = job_of(model_name, keep, given)
    if side.startswith("flatout"):
        set_ways(side.split("+")[1:])
        flatout(job, turns)
        return
    name = {"trainer": "trainer-best", "trainer-compiled": "trainer-best-compiled"}[
        side
    ]
    runtime, model = set_up(job.settings.runtime), _built(job)
    flags = flags_of(name, job, runtime)
    _trainer(_fed(model, job), flags, job.work_folder, turns).train()
    turns.tell(f"{flags.get('dataloader_num_workers')} workers")


def start(model: str, side: str, folder: Path) -> subprocess.Popen[str]:
    name = f"{model.replace('/', '')}-{side}"
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / f"cache-{name}")
    }
    command = [sys.executable, "-m", "tests.tools.image_rates", *sys.argv[1:]]
    command += ["--models", model, "--side", side]
    log = (folder / f"{name}.log").open("a")
    return subprocess.Popen(
        [*command, "--folder", str(folder)],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=environment,
    )


def all_sides(given: argparse.Namespace) -> None:
    """A side that runs out of memory, as several at once may, is tried again."""
    sides = [(m, s) for m in given.models for s in given.sides]
    os.environ["IMAGE_RATES"] = f"{len(sides)} {time.time() + given.compile_s}"
    running = {pair: start(*pair, given.folder) for pair in sides}
    tries = dict.fromkeys(sides, 1)
    while running:
        for pair, process in list(running.items()):
            if process.poll() is None:
                continue
            del running[pair]
            print(process.stdout.read() if process.stdout else "", end="", flush=True)
            if not process.returncode:
                continue
            name = f"{pair[0]} {pair[1]}".replace("/", "")
            log = (given.folder / f"{name.replace(' ', '-')}.log").read_text()
            if "out of memory" in log and tries[pair] < 3:
                tries[pair] += 1
                running[pair] = start(*pair, given.folder)
                continue
            print(f"{pair} failed: {log[-600:]}", flush=True)
            leave_out(name, given)
        time.sleep(0.2)


def leave_out(name: str, given: argparse.Namespace) -> None:
    """Of all rounds: nobody waits for it."""
    turns = given.folder / "turns"
    turns.mkdir(exist_ok=True)
    for number in range(given.rounds):
        (turns / f"{number}-{name}").touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=6_400)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--window", type=int, default=16, help="steps")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--sides", nargs="+", default=SIDES)
    parser.add_argument("--compile-s", type=float, default=150)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        count, until = os.environ["IMAGE_RATES"].split()
        given.count, given.until = int(count), float(until)
        one(given)
        return
    with tempfile.TemporaryDirectory() as name:
        given.folder = Path(name)
        make_files(given.folder / "raw", given.images)
        decode("pixels", given)
        if "flatout-files" in given.sides:
            decode("files", given)
        all_sides(given)


if __name__ == "__main__":
    main()
