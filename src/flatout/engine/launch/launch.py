"""Start training in this process, or in one process per device.

With several devices, this process uses none of them. It starts the ranks with PyTorch's
elastic launcher, supervises them, and reads the result that rank 0 writes.
"""

from __future__ import annotations

import json
import logging
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash

from flatout.engine.checkpoints.checkpoint_folder import finish
from flatout.engine.checkpoints.checkpoint_mirror import fetch_newest
from flatout.engine.checkpoints.resume import open_named
from flatout.engine.launch.job_files import JobFiles, token_key, tokenizer_file
from flatout.engine.launch.rank import TRAINING
from flatout.engine.launch.results import (
    load_finished_result,
    read_result,
    write_result,
)
from flatout.engine.launch.supervisor import Attempt, is_worth_another
from flatout.engine.machine import environment
from flatout.engine.machine.checks import warn_at_start
from flatout.engine.machine.runtime import set_up
from flatout.engine.parameters import DistributedSettings, Settings, SettingsError
from flatout.engine.rows.rows import rows_from_dataset
from flatout.engine.rows.vocabulary import Vocabulary
from flatout.engine.tokenizing.token_keys import check_tokens_match
from flatout.engine.train.keeping.oom import OutOfMemory
from flatout.engine.train.loop import TrainResult, train
from flatout.engine.train.process_group import ProcessGroup
from flatout.engine.train.setup.identity import identity
from flatout.engine.train.setup.job import TrainJob

logger = logging.getLogger(__name__)


def make_job(
    settings: Settings,
    splits: Mapping[str, Any],
    tokenizer: Any | None,
    label_names: Sequence[str],
) -> TrainJob:
    """Create the training job from the Datasets `train`, `validation` and `test`. Its
    checkpoints stay in `paths.checkpoints` until `checkpoint_folder.finish` is called.
    Raises StaleTokensError if the tokens were created with other settings or labels, or
    another tokenizer."""
    if tokenizer is not None:
        check_tokens_match(splits, settings, tokenizer, label_names)
    folder = Path(settings.paths.checkpoints)
    warn_at_start(settings, folder)
    rows = {name: rows_from_dataset(found) for name, found in splits.items()}
    keys = "".join(map(token_key, rows.values()))
    return TrainJob(
        settings=settings,
        **rows,
        vocabulary=None if tokenizer is None else Vocabulary.of(tokenizer),
        label_names=tuple(label_names),
        work_folder=folder.absolute(),
        metrics_file=Path(settings.paths.metrics).absolute(),
        tokenizer_file=tokenizer_file(tokenizer),
        data_key=xxhash.xxh3_128_hexdigest(keys.encode()),
    )


def collect(job: TrainJob) -> TrainResult:
    """Train `job` and return its result. If an earlier process has trained the job and
    the result is still in the job's folder, return that result without training."""
    return load_finished_result(job) or launch(job)


def run_job(job: TrainJob) -> TrainResult:
    """Train `job`, remove its checkpoints and return the main rank's result."""
    result = launch(job)
    finish(job.work_folder)
    return result


def launch(job: TrainJob) -> TrainResult:
    """Train `job` in this process, or in one process per device."""
    distributed = job.settings.train.distributed
    train_settings = job.settings.train
    url, resume = train_settings.checkpoint.mirror, train_settings.resume
    if url and resume == "auto" and distributed.machine_rank == 0:
        fetch_newest(url, job.work_folder, identity(job))
    if environment.launched_from_outside():
        return _train_with_launcher(job)
    if resume not in ("auto", "never"):
        open_named(resume)  # reject a bad checkpoint before any process starts
    processes = resolve_processes(distributed)
    if processes * distributed.num_machines > 1:
        return _start_ranks(job, processes)
    result = train(job, set_up(job.settings.runtime))
    write_result(job, result)
    return result


def resolve_processes(settings: DistributedSettings) -> int:
    """Return the number of ranks on this machine. Raises SettingsError if the machine
    has too few devices for `num_processes`."""
    gpus = environment.nvidia_gpu_count()
    if settings.num_processes == "auto":
        return gpus or 1
    devices, kind = (gpus, "GPU") if gpus else (environment.usable_cores(), "CPU core")
    if settings.num_processes > devices:
        plural = "s" if devices > 1 else ""
        raise SettingsError(
            f"train.distributed.num_processes={settings.num_processes}, but this "
            f"machine has {devices} {kind}{plural} to use: set it to at most "
            f"{devices}, or to auto"
        )
    return settings.num_processes


def _start_ranks(job: TrainJob, processes: int) -> TrainResult:
    """Start the ranks, wait for them and return the result. After a failure that the
    machine may have caused, start the ranks again, up to `max_restarts` times."""
    _check_cuda_untouched()
    settings = job.settings.train.distributed
    check_endpoint(settings)
    restarts = settings.max_restarts
    while True:
        with tempfile.TemporaryDirectory(prefix="flatout-") as name:
            write_spec(job, processes, Path(name))
            error = Attempt(job, processes, Path(name)).run()
        if error is None:
            break
        smaller = _smaller(job, error)
        if smaller is not None:
            job = smaller
        elif restarts > 0 and is_worth_another(error):
            restarts -= 1
            logger.warning("%s. Starting again (%d more after this)", error, restarts)
        else:
            raise error
    if settings.machine_rank > 0:
        logger.info("this machine has done its part; machine 0 has the results")
        raise SystemExit(0)
    return read_result(job)


def _smaller(job: TrainJob, error: Exception) -> TrainJob | None:
    """Return a job that needs less memory (without CUDA graphs, or with half the token
    budget), or None if the error has another cause or `on_oom` is not `shrink`. With
    several machines, return None, because the others would keep their settings."""
    train_settings = job.settings.train
    if train_settings.on_oom != "shrink" or not isinstance(error, OutOfMemory):
        return None
    if error.to_try is None or train_settings.distributed.num_machines > 1:
        return None
    logger.warning("%s. Starting again with %s", error, error.to_try)
    changes = {**error.to_try, "resume": "auto"}
    return job.changed({f"train.{name}": value for name, value in changes.items()})


def write_spec(
    job: TrainJob, processes: int, folder: Path, *, work: str = TRAINING
) -> None:
    """Write the ranks' input to `folder/spec.json`, which only this user can read.
    `work` is the module and the name of the function that each rank calls."""
    spec = {
        "work": work,
        "settings": job.settings.model_dump(mode="json"),
        "job": asdict(JobFiles.of(job, folder / "tokens")),
        "work_folder": str(job.work_folder.absolute()),
        "metrics_file": str(job.metrics_file.absolute()),
        "world_size": processes * job.settings.train.distributed.num_machines,
    }
    path = folder / "spec.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(spec), encoding="utf-8")


def _check_cuda_untouched() -> None:
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise SettingsError(
            "this process uses the GPU already, and the ranks need it for themselves: "
            "start a new process (or restart the notebook's kernel), or set "
            "train.distributed.num_processes: 1"
        )


def check_endpoint(settings: DistributedSettings) -> None:
    """Raise SettingsError if `rendezvous_endpoint` is not of the form host:port, or if
    its port is not available on machine 0."""
    endpoint = settings.rendezvous_endpoint
    if settings.num_machines == 1 or endpoint is None:
        return
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise SettingsError(
            f"train.distributed.rendezvous_endpoint: {endpoint!r} is not host:port"
        )
    if settings.machine_rank != 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except OSError as error:
            raise SettingsError(
                f"train.distributed.rendezvous_endpoint: port {port} of this machine "
                f"cannot be used ({error}): choose another one, on all machines"
            ) from None


def _train_with_launcher(job: TrainJob) -> TrainResult:
    """Train in this process, which torchrun, accelerate or Slurm started as rank 0."""
    ranks, settings = environment.current_ranks(), job.settings.train.distributed
    wanted = settings.num_processes
    if wanted not in ("auto", ranks.local_world_size):
        raise SettingsError(
            f"the launcher started {ranks.local_world_size} ranks on this machine, "
            f"train.distributed.num_processes is {wanted}: leave it at auto"
        )
    runtime = set_up(job.settings.runtime)
    if ranks.world_size == 1:
        result = train(job, runtime)
    else:
        from flatout.engine.launch.followers import call_followers

        with tempfile.TemporaryDirectory(prefix="flatout-") as name:
            write_spec(job, ranks.world_size, Path(name))
            call_followers((Path(name) / "spec.json").read_text(encoding="utf-8"))
            group = ProcessGroup.join(settings, runtime)
            result = train(job, runtime, group)
            group.leave()
    write_result(job, result)
    return result
