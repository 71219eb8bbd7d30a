"""Decide whether compilation and CUDA graphs are possible and worthwhile for the number
of planned steps. A resumed run keeps the decision of the run that it continues."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, replace
from typing import Any

from flatout.engine.checkpoints.resume import find_checkpoint
from flatout.engine.families import Family, family_of
from flatout.engine.machine.environment import c_compiler
from flatout.engine.machine.runtime import Runtime
from flatout.engine.models.compilation import distinct_parts
from flatout.engine.models.flops import ModelFlops, launch_tokens, sheet_tflops
from flatout.engine.models.memory import estimate
from flatout.engine.parameters import SettingsError, TrainSettings
from flatout.engine.train.setup.budgets import rank_tokens, token_budget
from flatout.engine.train.setup.compile_choice import Choice, Work, choose_compilation
from flatout.engine.train.setup.job import TrainJob
from flatout.engine.train.step import MAX_GRAPHS

GRAPH_MAX_TOKENS = 16_384
"""If the speed of the device is unknown, kernel launches are assumed to limit the
throughput of steps with at most this number of tokens per rank."""
SLOW_HOST = 1.5
"""A factor that allows for slower hosts. At 24,600 tokens per step, CUDA graphs
increased the throughput of BERT-base by less than 1 % on one host (7,821 to 7,868
samples/s) and by 6 % on another (7,668 to 8,160 samples/s)."""
GRAPH_MEMORY_SHARE = 0.8
"""The maximum fraction of the device's memory that a step with CUDA graphs may need."""
GRAPH_PAD_MULTIPLE = 256
"""With CUDA graphs, the token count of packed batches is rounded up to a multiple of at
least this number, to limit the number of graphs."""
GRAPH_PAD_SHARE = 1 / 96
"""The ratio of the multiple to a rank's mean tokens per step, e.g. 256 / 24,600."""

NO_C_COMPILER = "no C compiler (gcc or clang) is installed here"


@dataclass(frozen=True)
class Planned:
    """The work of a run, as planned on the main rank for all ranks."""

    steps: int
    parts: int
    """The number of different parts of the model that would be compiled."""
    sample_flops: int = 0
    """The FLOPs of training on one sample of fixed shape, or 0 for token rows."""
    earlier: Choice | None = None
    """The choice of the run to resume. It is kept, so that results are identical."""
    token_budget: int | None = None
    """The token budget of the run to resume."""


def plan(job: TrainJob, runtime: Runtime, model: Any) -> Planned:
    """Return the planned work for a transformers `model`. The choices of a resumed run
    are kept on the same kind and number of devices."""
    checkpoint = find_checkpoint(job.settings.train.resume, job.work_folder)
    kept = checkpoint.manifest.accelerated if checkpoint else {}
    if any(kept.get(name) != v for name, v in _device_facts(runtime).items()):
        kept = {}  # choose again for another device or number of ranks
    earlier: Choice | None = None
    done = flops = 0
    if kept:
        earlier = Choice(kept["compile"], kept["cuda_graphs"], kept["reason"])
    elif checkpoint:
        done = checkpoint.manifest.step
    if runtime.is_cuda and job.train.one_shape:
        flops = ModelFlops.of(model).over(tokens=1, targets=1, attention_pairs=0)
    return Planned(
        steps=max(1, job.total_steps - done),
        parts=distinct_parts(model),
        sample_flops=flops,
        earlier=earlier,
        token_budget=kept.get("token_budget"),
    )


def checkpoint_values(resolved: Any, runtime: Runtime) -> dict[str, Any]:
    """Return the choices that a resumed run keeps, and the device."""
    return {
        "compile": resolved.compile,
        "cuda_graphs": resolved.cuda_graphs,
        "token_budget": resolved.token_budget,
        "reason": resolved.compile_reason,
        **_device_facts(runtime),
    }


def _device_facts(runtime: Runtime) -> dict[str, Any]:
    return {"device": runtime.device_name, "world_size": runtime.ranks.world_size}


def choose_compile_and_graphs(
    job: TrainJob,
    runtime: Runtime,
    config: Any,
    strategy: str,
    planned: Planned | None,
) -> Choice:
    """Decide on compilation and CUDA graphs. With `auto`, each is used if it saves time
    over the `planned` work, or if it makes steps faster when `planned` is None. Raises
    SettingsError if a setting is impossible."""
    compiled = _resolve_compile(job.settings.train.compile, runtime, config)
    recorded = _resolve_cuda_graphs(job, runtime, strategy, config)
    known = Choice(compiled is not False, recorded is not False)
    if planned is None:
        return known
    if planned.earlier is not None:
        kept = planned.earlier
        same = Choice(
            kept.compile if compiled is None else compiled,
            kept.cuda_graphs if recorded is None else recorded,
            kept.reason,
        )
        return same if same == kept else replace(same, reason="")
    if None not in (compiled, recorded):
        return known
    work = _work(job, runtime, config, planned)
    return choose_compilation(work, compiled, recorded) if work else known


def _work(
    job: TrainJob, runtime: Runtime, config: Any, planned: Planned
) -> Work | None:
    """Return the planned work in the form that `choose_compilation` needs. Return None
    if its FLOPs are unknown, or on a CPU, on which `auto` never compiles."""
    layers, tokens = family_of(config).num_layers(config), rank_tokens(job, runtime)
    weights = 12 * layers * width_of(config) ** 2
    flops = tokens * (planned.sample_flops or 6 * weights)
    peak = sheet_tflops(runtime) if runtime.is_cuda else None
    if not (layers and flops and peak):
        return None
    return Work(
        steps=planned.steps,
        step_flops=flops,
        layers=layers,
        peak_tflops=peak,
        parts=planned.parts,
        shapes=_shapes(job, runtime),
    )


def _shapes(job: TrainJob, runtime: Runtime) -> int:
    """Return an upper bound on the number of different shapes of packed steps. The
    number of tokens per step is assumed to be within two standard deviations of its
    mean. An upper bound on the standard deviation follows from the mean and maximum
    length of rows (Bhatia & Davis 2000)."""
    largest, mean = job.train.facts.largest_sample, job.train.facts.mean_length
    variance = rank_tokens(job, runtime) * max(0.0, largest - mean)
    around = 4 * math.sqrt(variance)
    return min(MAX_GRAPHS, 1 + int(around / graph_multiple(job, runtime)))


def _resolve_compile(wanted: bool | str, runtime: Runtime, config: Any) -> bool | None:
    """Return whether to compile, or None if `auto` leaves the decision open. Raises
    SettingsError if compilation is required and there is no compiler."""
    if wanted == "auto":
        family, several = family_of(config), runtime.ranks.world_size > 1
        # BatchNorm synchronises ranks within the graph, which has not been tested.
        untried = several and family.samples.batch_statistics
        works = runtime.is_cuda and family.schedule.compiles and not untried
        return None if works and not _compiler_fault(runtime) else False
    if wanted and (fault := _compiler_fault(runtime)):
        raise SettingsError(
            f"train.compile: {fault}; install one, or set train.compile: false"
        )
    return bool(wanted)


def _compiler_fault(runtime: Runtime) -> str | None:
    if runtime.is_cuda:
        return None if c_compiler() else NO_C_COMPILER
    if any(map(shutil.which, ("g++", "clang++", "c++"))):
        return None
    return "no C++ compiler (g++ or clang++) is installed here"


def without_compiler(runtime: Runtime) -> list[str]:
    """Return a list with a warning if there is a GPU but no compiler for kernels."""
    if not (runtime.is_cuda and _compiler_fault(runtime)):
        return []
    return [
        f"{NO_C_COMPILER}: PyTorch's kernels replace Triton's, and steps are not "
        "compiled. Install one (apt install gcc) for faster steps"
    ]


def _resolve_cuda_graphs(
    job: TrainJob, runtime: Runtime, strategy: str, config: Any
) -> bool | None:
    """Return whether to use CUDA graphs, or None if `auto` leaves the decision open.
    Raises SettingsError if graphs are required but impossible."""
    train, family = job.settings.train, family_of(config)
    possible = _can_record(job, runtime, strategy, family)
    if train.cuda_graphs != "auto":
        if train.cuda_graphs and not possible:
            raise SettingsError(
                "train.cuda_graphs needs a GPU, the fused adamw, no sharding (fsdp), "
                "a loss of single samples (not embedding), and packed rows, or a model "
                "whose padded ones may be recorded (LSTMs, tables, images): set it to "
                "auto or false"
            )
        return bool(train.cuda_graphs)
    # Capturing with gradient checkpointing has not been tested.
    unasked = family.schedule.records_unasked and not train.gradient_checkpointing
    if not (possible and unasked):
        return False
    most = _most_graph_tokens(job, runtime, strategy, config)
    small = rank_tokens(job, runtime) <= most
    return None if small and _graphs_fit(job, runtime, config) else False


def _can_record(job: TrainJob, runtime: Runtime, strategy: str, family: Family) -> bool:
    train = job.settings.train
    whole = runtime.ranks.world_size == 1 or train.distributed.strategy == "ddp"
    shapes_recur = strategy in ("fixed", "grouped") and family.schedule.records_padded
    possible = (strategy == "packed" or shapes_recur) and not job.task.whole_batch
    return runtime.is_cuda and fused(train) and whole and possible


def fused(train: TrainSettings) -> bool:
    """Return whether the optimizer is fused AdamW, which skips non-finite steps."""
    return train.fused_optimizer and train.optimizer == "adamw"


def graph_multiple(job: TrainJob, runtime: Runtime) -> int:
    """Return the multiple, a power of two, to which the number of tokens in a packed
    batch is rounded up if CUDA graphs are used."""
    share = int(rank_tokens(job, runtime) * GRAPH_PAD_SHARE)
    return max(GRAPH_PAD_MULTIPLE, 1 << max(0, share - 1).bit_length())


def width_of(config: Any) -> int:
    """Return the hidden size, or 0 if custom code gives it another name."""
    return int(getattr(config, "hidden_size", 0))


def _most_graph_tokens(
    job: TrainJob, runtime: Runtime, strategy: str, config: Any
) -> float:
    """Return the maximum number of tokens per step for which kernel launches limit the
    speed. It is at most the token budget, because larger batches are divided
    differently at each step, and each division would need its own graph."""
    budget = token_budget(job, runtime, strategy, config)
    if family_of(config).schedule.launches_by_place:
        return budget
    known = launch_tokens(width_of(config), runtime)
    limit = SLOW_HOST * known if known else GRAPH_MAX_TOKENS
    return min(limit, budget)


def _graphs_fit(job: TrainJob, runtime: Runtime, config: Any) -> bool:
    """Return whether memory suffices for CUDA graphs and their separate memory pool."""
    memory = runtime.device_memory_bytes
    if memory is None:
        return True
    needed = estimate(job.settings, config, int(rank_tokens(job, runtime)))
    return needed.total + needed.activations <= GRAPH_MEMORY_SHARE * memory
