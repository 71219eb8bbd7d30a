"""Kedro's configuration loader: conf/local in force below some environments, files
read once, and parameters checked and complete."""

from __future__ import annotations

import time
from copy import deepcopy
from pathlib import Path
from typing import Any

from kedro.config import OmegaConfigLoader
from omegaconf import OmegaConf

from flatout.engine.parameters import Settings, SettingsModel, parse_settings
from flatout.places import project_path
from flatout.project.fitting import fit_pipelines

TUNED, BEST = "tuned", "best"
"""Environments that the benchmark and the sweep write."""

SITUATIONS = ("first_try", "low_memory", "slow_loader", "final_run", "reproducible")

SETTINGS_OF_TRAINING = ("slow", TUNED, BEST, *SITUATIONS)
"""Environments that only say how to train: the user's data, model and credentials are
those of conf/local."""


class NotTunedError(Exception):
    """The environment `tuned` was asked for before a benchmark has written it."""


class ProjectConfigLoader(OmegaConfigLoader):
    """base <- env, as Kedro has it; base <- local <- env for SETTINGS_OF_TRAINING.
    `tuned` and `best` lie over the environment that they were measured in.

    Kedro alone would put `tuned` in the place of `local`, and train the built-in corpus
    with settings that were measured on the user's own.

    Kedro's parses all files again at each access, and a run has a dozen: half a second.
    `parameters` has the defaults of all that no file names.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.created_s = time.perf_counter()
        self._found: dict[tuple[str, str], dict[str, Any]] = {}
        self._parsed: dict[str, Settings] = {}
        super().__init__(*args, **options)
        OmegaConf.register_new_resolver("conf_path", self._conf_path, replace=True)
        OmegaConf.register_new_resolver("this_run", self.this_run, replace=True)
        if self.env == TUNED:
            self._check_tuned()

    def _conf_path(self, path: str) -> str:
        """`path` in the folder of configuration in use; the project's own where that is
        an archive."""
        conf = Path(self.conf_source)
        return (
            str(conf.absolute() / path)
            if conf.is_dir()
            else project_path(f"conf/{path}")
        )

    def this_run(self) -> dict[str, Any]:
        """What another command must say to train on the same: its environment, where
        that is one of data or models, and the parameters of its command line."""
        env = self.lower_env if self.env in SETTINGS_OF_TRAINING else self.env
        named = None if env in (None, self.base_env, self.default_run_env) else env
        return {"environment": named, "params": self.runtime_params or {}}

    def _check_tuned(self) -> None:
        """An archive of conf/ is Kedro's to read."""
        conf = Path(self.conf_source)
        folder = conf / TUNED
        if conf.is_dir() and not any(folder.rglob("parameters*")):
            raise NotTunedError(
                f"{folder} has no parameters yet: kedro run --pipelines=benchmark "
                "writes them"
            )

    @property
    def given_parameters(self) -> dict[str, Any]:
        """What files and the command line name, and nothing else."""
        return self._once("parameters")

    @property
    def settings(self) -> Settings:
        """All parameters, parsed once. Pipelines fit them from then on: Kedro-Viz runs
        no hook that could see to it. Raises SettingsError."""
        state = repr((self.env, self.runtime_params))
        if state not in self._parsed:
            self._parsed[state] = rooted(parse_settings(self.given_parameters))
            fit_pipelines(self._parsed[state])
        return self._parsed[state]

    def layers(self) -> dict[str, dict[str, Any]]:
        """The parameters that each place names, by its name, the last one in force."""
        given, self.runtime_params = self.runtime_params, {}
        folders = [self.base_env, self.env or self.default_run_env]
        if self._is_layered:
            folders.insert(1, self.lower_env)
        try:
            found = {
                f"conf/{name}": self._folder(name, "parameters") for name in folders
            }
        finally:
            self.runtime_params = given
        return {**found, "command line": given or {}}

    def __getitem__(self, key: str) -> dict[str, Any]:
        found = self._once(key)
        return found if key != "parameters" else {**found, **self._complete(found)}

    def __setitem__(self, key: str, value: Any) -> None:
        self._found.clear()  # globals are in what was read of others
        self._parsed.clear()
        super().__setitem__(key, value)

    def _complete(self, given: dict[str, Any]) -> dict[str, Any]:
        """Groups with every default; single values only where they are `given`."""
        return {
            name: value
            for name, value in self.settings.model_dump().items()
            if name in given or isinstance(getattr(self.settings, name), SettingsModel)
        }

    def _once(self, key: str) -> dict[str, Any]:
        if key in self:  # set by hand
            return super().__getitem__(key)
        state = (key, repr((self.env, self.runtime_params)))
        if state not in self._found:
            self._found[state] = self._read(key)
        return deepcopy(self._found[state])

    def _read(self, key: str) -> dict[str, Any]:
        if not self._is_layered or key not in self.config_patterns:
            return super().__getitem__(key)
        asked, self.env = self.env, self.lower_env
        try:
            under = super().__getitem__(key)
        finally:
            self.env = asked
        return self._over(under, key)

    @property
    def _is_layered(self) -> bool:
        lower = Path(self.conf_source) / self.lower_env
        return self.env in SETTINGS_OF_TRAINING and lower.is_dir()

    @property
    def lower_env(self) -> str:
        """What lies below SETTINGS_OF_TRAINING: of measured ones the environment that
        they were measured in, which may be of images or numbers."""
        name = str(self.env)
        is_there = name in (TUNED, BEST) and Path(self.conf_source, name).is_dir()
        measured = self._folder(name, "parameters") if is_there else {}
        return str((measured.get(name) or {}).get("environment", self.default_run_env))

    def _over(self, under: dict[str, Any], key: str) -> dict[str, Any]:
        over = self._folder(str(self.env), key)
        if self.merge_strategy.get(key) != "soft":
            return {**under, **over}
        merged = OmegaConf.merge(under, over)
        return dict(OmegaConf.to_container(merged))  # type: ignore[arg-type]

    def _folder(self, name: str, key: str) -> dict[str, Any]:
        return self.load_and_merge_dir_config(
            str(Path(self.conf_source) / name),
            self.config_patterns[key],
            key,
            set(),
            key == "credentials",
        )


def rooted(settings: Settings) -> Settings:
    """`settings` with paths that start at the project, whatever the working directory.

    A name of a checkpoint is a path if the project has a folder of that name."""
    if Path(project_path()) == Path.cwd():
        return settings
    model, sweep, name = settings.model, settings.sweep, settings.model.name_or_path
    storage = sweep.storage if "://" in sweep.storage else project_path(sweep.storage)
    if name and Path(project_path(name)).is_dir():
        model = model.model_copy(update={"name_or_path": project_path(name)})
    paths = {
        key: project_path(path) for key, path in settings.paths.model_dump().items()
    }
    swept = {"folder": project_path(sweep.folder), "storage": storage}
    trials = {"folder": project_path(settings.benchmark.folder)}
    changed = {
        "model": model,
        "paths": settings.paths.model_copy(update=paths),
        "sweep": sweep.model_copy(update=swept),
        "benchmark": settings.benchmark.model_copy(update=trials),
    }
    return settings.model_copy(update=changed)
