"""Peak memory of each rank where a model is sharded, phase by phase.

    python -m tests.tools.fsdp_memory                    two GPUs, NCCL
    python -m tests.tools.fsdp_memory --compile yes      layers compiled
    python -m tests.tools.fsdp_memory --device cpu       the same in small, gloo

A decoder whose training state (16 bytes a parameter) does not fit `--limit-gib`, which
each process is held to, trains four steps, writes a checkpoint and ends; new processes
resume from it, take two steps, save the model and load it back. No rank may hold more
than its shard, what is gathered at a time (a block and what lies outside of blocks, two
of these while one is fetched ahead, and its gradients) and `--activations-gib`. Exit
status 1 where one does. On CPUs memory is shown and not judged.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from flatout.engine.checkpoints.checkpoint_folder import Manifest, newest_sound
from flatout.engine.checkpoints.checkpoint_writer import CheckpointWriter
from flatout.engine.machine.environment import current_ranks
from flatout.engine.machine.runtime import set_up
from flatout.engine.parameters import parse_settings
from flatout.engine.rows.tokens import TokenRows
from flatout.engine.rows.vocabulary import Vocabulary
from flatout.engine.train.keeping.saved_model import load_weights, save_model
from flatout.engine.train.keeping.snapshots import Snapshots, restore
from flatout.engine.train.process_group import ProcessGroup
from flatout.engine.train.recording.recorder import Recorder
from flatout.engine.train.setup.assemble import assemble
from flatout.engine.train.setup.job import TrainJob

logger = logging.getLogger(__name__)

GIB = 2**30
STATE_BYTES = 16
"""A parameter: weight, gradient and two moments, fp32."""
SIZES = {
    "cuda": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 32_000,
    },
    "cpu": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 1000,
    },
}
LAYER = "FSDPLlamaDecoderLayer"
ROW_TOKENS, ROWS, STEPS, MORE_STEPS = 64, 64, 4, 2
HELD = {"build": 4, "step": 16, "checkpoint": 16, "resume": 12, "save": 16, "load": 16}
"""Bytes that a rank's shard has of a parameter, at most, in each phase."""


def make_job(
    folder: Path, sizes: dict[str, int], ranks: int, *, compiled: bool
) -> TrainJob:
    vocabulary = sizes["vocab_size"]
    settings = parse_settings(
        {
            "runtime": {"precision": "bf16"},
            "model": {
                "task": "causal-lm",
                "config": {
                    "model_type": "llama",
                    "tie_word_embeddings": True,
                    "max_position_embeddings": ROW_TOKENS,
                    **sizes,
                },
            },
            "tokenize": {"max_length": ROW_TOKENS},
            "train": {
                "global_batch_size": 8,
                "token_budget": 4 * ROW_TOKENS,
                "max_steps": STEPS + MORE_STEPS,
                "compile": compiled,
                "cuda_graphs": False,
                "loader": {"num_workers": 0},
                "distributed": {"num_processes": ranks, "strategy": "fsdp"},
            },
        }
    )
    ids = np.random.default_rng(0).integers(5, vocabulary, (ROWS, ROW_TOKENS))
    column = pa.array(list(ids.astype(np.int32)), pa.list_(pa.int32()))
    rows = TokenRows(pa.table({"input_ids": column}))
    known = Vocabulary(vocabulary, 0, special_token_ids=(0, 1, 2))
    paths = (folder / "checkpoints", folder / "metrics.jsonl")
    return TrainJob(settings, rows, rows, rows, known, (), *paths, "k")


class Peaks:
    """Most memory of this process, of each phase."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rows: list[dict] = []

    @contextmanager
    def phase(self, name: str):
        is_cuda = self.device.type == "cuda"
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        yield
        found = {"phase": name, "host": resource.getrusage(resource.RUSAGE_SELF)[2]}
        found["host"] *= 1024  # Linux counts it in KiB
        if is_cuda:
            torch.cuda.synchronize(self.device)
            found["allocated"] = torch.cuda.max_memory_allocated(self.device)
            found["reserved"] = torch.cuda.max_memory_reserved(self.device)
        self.rows.append(found)


def work(stage: str, folder: Path, args: argparse.Namespace) -> None:
    """One rank, in `stage` train or resume."""
    ranks = current_ranks()
    if torch.cuda.is_available():
        whole = torch.cuda.get_device_properties(ranks.local_rank).total_memory
        torch.cuda.set_per_process_memory_fraction(
            args.limit_gib * GIB / whole, ranks.local_rank
        )
    sizes = SIZES[args.device]
    job = make_job(folder, sizes, ranks.world_size, compiled=args.compile == "yes")
    runtime = set_up(job.settings.runtime)
    group = ProcessGroup.join(job.settings.train.distributed, runtime)
    peaks = Peaks(runtime.device)
    with peaks.phase("build"):
        trainer = assemble(job, runtime, group)
    recorder = Recorder(trainer, 0.0)
    facts = {"parameters": sum(p.numel() for p in trainer.model.parameters())}
    layers = [m for m in trainer.model.modules() if type(m).__name__ == LAYER]
    inside = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    facts |= {"block": max(inside), "outside": facts["parameters"] - sum(inside)}
    if stage == "train":
        train(trainer, recorder, group, peaks)
    else:
        resume(trainer, recorder, group, peaks, folder)
    losses = [float(loss) for loss in trainer.losses]
    text = json.dumps({**facts, "phases": peaks.rows, "losses": losses})
    (folder / f"{stage}-{ranks.rank}.json").write_text(text)
    group.leave()


def take_steps(trainer, steps: range) -> None:
    trainer.losses = []
    for step in steps:
        trainer.stepper(trainer.data[step])
        loss = trainer.stepper.sums.last_loss.detach().clone()
        torch.distributed.all_reduce(loss)
        trainer.losses.append(loss)


def train(trainer, recorder, group, peaks) -> None:
    job = trainer.job
    with peaks.phase("step"):
        take_steps(trainer, range(STEPS))
    with peaks.phase("checkpoint"):
        writer = CheckpointWriter(job.work_folder, 2, group.writers)
        snapshot = Snapshots(trainer, recorder, group.control).take()
        world_size = trainer.runtime.ranks.world_size
        writer.start(snapshot.write, Manifest(STEPS, STEPS, world_size, {}, None))
        writer.wait()
    if writer.faults:
        raise SystemExit(writer.faults[0])


def resume(trainer, recorder, group, peaks, folder: Path) -> None:
    found, faults = newest_sound(trainer.job.work_folder)
    if found is None:
        raise SystemExit(f"no checkpoint: {faults}")
    with peaks.phase("resume"):
        is_main = trainer.runtime.ranks.is_main
        restore(found if is_main else None, trainer, recorder, group.control)
    with peaks.phase("step"):
        take_steps(trainer, range(STEPS, STEPS + MORE_STEPS))
    with peaks.phase("save"):
        save_model(trainer, folder / "model", group.control)
    with peaks.phase("load"):
        load_weights(trainer, folder / "model", group.control)


def launch(stage: str, folder: Path, args: argparse.Namespace) -> list[dict]:
    """What the ranks of `stage` wrote."""
    own = [f"--{k.replace('_', '-')}={v}" for k, v in vars(args).items() if v]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={args.ranks}", "-m", "tests.tools.fsdp_memory"),
        *(*own, f"--stage={stage}", f"--folder={folder}"),
    ]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if args.device == "cpu" else {}
    subprocess.run(command, check=True, env={**os.environ, **hidden})
    paths = [folder / f"{stage}-{rank}.json" for rank in range(args.ranks)]
    return [json.loads(path.read_text()) for path in paths]


def bound(phase: str, facts: dict, args: argparse.Namespace) -> float:
    """Bytes that a rank may have allocated."""
    shard = HELD[phase] * facts["parameters"] / args.ranks
    gathered = 3 * 4 * (facts["block"] + facts["outside"])
    return shard + gathered + (args.activations_gib * GIB if phase == "step" else 0)


def report(stages: dict[str, list[dict]], args: argparse.Namespace) -> int:
    facts = stages["train"][0]
    state = STATE_BYTES * facts["parameters"]
    logger.info(
        f"\n{facts['parameters'] / 1e9:.3f} G parameters: training state "
        f"{state / GIB:.2f} GiB, shard of {args.ranks} {state / args.ranks / GIB:.2f}, "
        f"block {4 * facts['block'] / GIB:.3f}, outside of blocks "
        f"{4 * facts['outside'] / GIB:.3f}; limit of a process {args.limit_gib} GiB"
    )
    logger.info(
        "\n| processes | rank | phase | allocated | reserved | bound | host | |"
    )
    logger.info("|---|---|---|---|---|---|---|---|")
    beyond = 0
    for stage, ranks in stages.items():
        for rank, found in enumerate(ranks):
            for row in found["phases"]:
                most = bound(row["phase"], facts, args)
                over = row.get("allocated", 0) > most
                beyond += over
                figures = (row.get("allocated"), row.get("reserved"), most, row["host"])
                cells = [f"{v / GIB:.2f}" if v is not None else "" for v in figures]
                verdict = "beyond" if over else "ok" if "allocated" in row else ""
                cells = [stage, str(rank), row["phase"], *cells, verdict]
                logger.info(f"| {' | '.join(cells)} |")
    logger.info(
        "GiB at most; host: resident, of the process so far. Losses of the steps:"
    )
    logger.info(
        {stage: [round(x, 4) for x in r[0]["losses"]] for stage, r in stages.items()}
    )
    if args.device == "cuda" and state <= args.limit_gib * GIB:
        logger.info("the training state fits the limit: nothing is shown")
        return 1
    logger.info(f"{beyond} beyond their bound" if beyond else "none beyond its bound")
    return 1 if beyond else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit-gib", type=float, default=18.0)
    parser.add_argument("--activations-gib", type=float, default=1.0)
    parser.add_argument("--compile", choices=["yes", "no"], default="no")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parsed()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    if args.stage:
        work(args.stage, Path(args.folder), args)
        return 0
    with tempfile.TemporaryDirectory(prefix="fsdp-memory-") as name:
        folder = Path(name)
        stages = {stage: launch(stage, folder, args) for stage in ("train", "resume")}
        return report(stages, args)


if __name__ == "__main__":
    sys.exit(main())
