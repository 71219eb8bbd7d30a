"""Run all checks in order. The parameters are checked first, and torch is imported only
once the environment variables are set."""

from __future__ import annotations

import logging
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from kedro.framework.context import KedroContext
from kedro.framework.session import KedroSession

from flatout.doctor import data, device, model
from flatout.doctor.finding import Check, examine, guarded
from flatout.doctor.versions import versions
from flatout.engine.machine import checks, environment
from flatout.engine.machine.checks import Finding, processes_here
from flatout.engine.machine.container import available_memory_bytes
from flatout.engine.machine.driver import Driver, query_driver
from flatout.engine.models.memory import GIB, estimate, guessed_tokens
from flatout.engine.parameters import Settings
from flatout.engine.rows import max_length, row_kind
from flatout.project.command_line import check_environment
from flatout.project.config_loader import loader_of
from flatout.project.data.outputs import local_paths


def examination(env: str | None, params: dict[str, Any]) -> list[Finding]:
    """Return the findings for a `kedro run` with the options --env and --params."""
    before = environment.thread_variables()
    patient = ExaminedProject(before)
    for name in ("kedro", "flatout"):  # the table contains all messages
        logging.getLogger(name).setLevel(logging.WARNING)
    first = guarded("parameters", partial(patient.load, env, params), "fail")
    environment.apply(patient.settings.runtime)  # has no effect if already applied
    return [*first, *examine(patient.checks())]


class ExaminedProject:
    """The project and the machine to check. If the project cannot be loaded, the
    default settings are used and the catalog is not checked."""

    def __init__(self, thread_variables: dict[str, str]) -> None:
        self._thread_variables = thread_variables
        self._context: KedroContext | None = None
        self.settings = Settings()

    def load(self, env: str | None, params: dict[str, Any]) -> Finding:
        """Load and check the parameters. Raises any error that would prevent a run."""
        check_environment(env)
        session = KedroSession.create(env=env, runtime_params=params)
        context = session.load_context()
        self.settings = loader_of(context).settings
        self._context = context
        return Finding("parameters", "ok", f"valid (environment {env or 'local'})")

    def checks(self) -> dict[str, Check]:
        settings, folder = self.settings, self._folder
        count = processes_here(settings)
        runtime, before = settings.runtime, self._thread_variables
        found: dict[str, Check] = {
            "versions": versions,
            "device": lambda: device.device(self.driver, self.torch, settings),
            "GPU memory": lambda: checks.gpu_programs(self.driver),
            "compiler": lambda: device.compiler(self.torch, settings),
            "threads": lambda: checks.threads(runtime, before, count),
            checks.SHM: self._shared_memory,
            "disk": self._disk,
            "file system": lambda: checks.file_system(folder),
        }
        if (context := self._context) is None:
            return found
        if row_kind(settings.train.rows).kind == "tokens":
            found["data"] = lambda: data.raw_rows(context.catalog, settings)
        return found | {
            "rows": lambda: data.rows(context.catalog, settings),
            "model": lambda: model.checkpoint(settings.model, self._config),
            "memory": self._memory,
        }

    @cached_property
    def driver(self) -> Driver | None:
        return query_driver()

    @cached_property
    def torch(self) -> device.Torch:
        return device.query_torch()

    @cached_property
    def _config(self) -> Any | None:
        """The model's config, or None if it would have to be downloaded."""
        try:
            return model.read_config(self.settings)
        except model.NotCached:
            return None

    @cached_property
    def _folder(self) -> Path:
        return Path(self.settings.paths.checkpoints)

    def _shared_memory(self) -> Finding:
        from flatout.engine.batches.loader import resolve_workers, shared_memory_bytes

        train, count = self.settings.train, processes_here(self.settings)
        workers = resolve_workers(train.loader, self.torch.gpus > 0, count)
        batch = train.global_batch_size, max_length(self.settings)
        needed = count * shared_memory_bytes(train.loader, workers, *batch)
        return checks.shared_memory(environment.free_shared_memory_bytes(), needed)

    def _disk(self) -> Finding:
        needed, written = checks.LEAST_FREE_BYTES, []
        if self._context:
            written = local_paths(self._context)
            if self._config:
                keep = self.settings.train.checkpoint.keep
                needed = model.disk_bytes(self._config, self.settings.model, keep)
        return checks.disk_space(self._folder, needed, written)

    def _memory(self) -> Finding:
        if (config := self._config) is None:
            return Finding("memory", "ok", "unknown until the model is downloaded")
        train, ranks = self.settings.train, processes_here(self.settings)
        ranks *= train.distributed.num_machines
        shards = ranks if train.distributed.strategy == "fsdp" else 1
        name, size = "free RAM", available_memory_bytes()
        if self.torch.gpus > 0 and self.driver:
            gpu = self.driver.gpus[0]
            name, size = gpu.name, gpu.total_bytes
            limit_gib = self.settings.runtime.memory_limit_gib
            size = size if limit_gib is None else min(size, int(limit_gib * GIB))
        budget = self._token_budget(config, size, shards)
        found = estimate(self.settings, config, budget, shards)
        return model.memory_finding(found, size, name)

    def _token_budget(self, config: Any, size: int, shards: int) -> int:
        """Return the configured token budget. If it is `auto`, return the default
        budget, limited to what fits into a GPU with `size` bytes."""
        from flatout.engine.train.setup.budgets import default_token_budget

        if (wanted := self.settings.train.token_budget) != "auto":
            return wanted
        gpu = self.torch.gpus > 0
        budget = default_token_budget(gpu)
        fitting = guessed_tokens(self.settings, config, size, shards) if gpu else None
        if fitting is None:
            return budget
        return min(budget, max(fitting, max_length(self.settings)))
