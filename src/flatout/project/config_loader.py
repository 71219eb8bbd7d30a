"""Kedro's configuration loader with one rule for all environments: conf/local overrides
conf/base, and the environment overrides both."""

from __future__ import annotations

import time
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from kedro.config import MissingConfigException, OmegaConfigLoader
from kedro.framework.context import KedroContext
from omegaconf import OmegaConf

from flatout.engine.parameters import (
    Settings,
    SettingsError,
    SettingsModel,
    in_role,
    parse_settings,
)
from flatout.engine.parameters.common import PATH
from flatout.places import project_path
from flatout.project.fitting import fit_pipelines

WRITERS = {"tuned": "benchmark", "best": "sweep"}
"""Maps each environment that is written by a pipeline to the name of that pipeline."""

PARAMETERS = "parameters*.y*ml"
SITUATIONS = ("first_try", "low_memory", "slow_loader", "final_run", "reproducible")
SETTINGS_OF_TRAINING = ("slow", *WRITERS, *SITUATIONS)
"""Environments that set training options but neither the data nor the model."""


class NotTunedError(Exception):
    """Raised if the environment `tuned` or `best` is requested before it exists."""


class ProjectConfigLoader(OmegaConfigLoader):
    """Loader that merges the layers base, local and the environment, in this order.

    In Kedro, the environment replaces `local`, so `--env=tuned` would train on the
    built-in corpus with settings that were measured on the user's data. Here `tuned`
    and `best` are merged over the environment in which they were measured. `parameters`
    includes defaults for all parameters that are not set in a file.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.created_s = time.perf_counter()
        self._parsed: dict[str, Settings] = {}
        self._unresolved: dict[str, Any] = {}
        super().__init__(*args, **options)
        OmegaConf.register_new_resolver("conf_path", self._conf_path, replace=True)
        OmegaConf.register_new_resolver("this_run", self.this_run, replace=True)
        OmegaConf.register_new_resolver("parameter", self._parameter, replace=True)
        OmegaConf.register_new_resolver("data_dir", self._data_dir, replace=True)
        OmegaConf.register_new_resolver("shard", self._shard, replace=True)
        if self.env in WRITERS:
            self._check_written()

    def _conf_path(self, path: str) -> str:
        """Return the location of `path` in the configuration folder in use. If the
        configuration is an archive, the project's conf/ folder is used instead."""
        conf = Path(self.conf_source)
        if conf.is_dir():
            return str(conf.absolute() / path)
        return project_path(f"conf/{path}")

    def _parameter(self, path: str, default: Any = None) -> Any:
        """Resolve e.g. `${parameter:corpus.rows}` in a catalog to the value set on the
        command line or in the parameter files."""
        state = repr((self.env, self.runtime_params))
        if state not in self._unresolved:
            given = self._files([self.base_env, *self._environments()])
            self._unresolved[state] = OmegaConf.merge(given, self.runtime_params or {})
        return OmegaConf.select(self._unresolved[state], path, default=default)

    def _data_dir(self) -> str:
        """Resolve `${data_dir:}` to the folder in which a run writes all its files."""
        return str(self._parameter("data_dir", "data"))

    def _shard(self) -> str:
        """Resolve `${shard:}` in a file name, e.g. to `-2-of-8` for predict.shard
        2/8."""
        found = self._parameter("predict.shard")
        return f"-{found}".replace("/", "-of-") if found else ""

    def this_run(self) -> dict[str, Any]:
        """Return a dict with the key `environment`. The value is the name of the
        environment that defines the data, or None for the default environment."""
        env = self.env
        if env in SETTINGS_OF_TRAINING:
            env = self._measured_environment()
        named = None if env in (None, self.base_env, self.default_run_env) else env
        return {"environment": named}

    def _check_written(self) -> None:
        """Raise NotTunedError if no pipeline has written the environment yet. If the
        configuration is an archive, nothing is checked."""
        conf, writer = Path(self.conf_source), WRITERS[str(self.env)]
        folder = conf / str(self.env)
        if conf.is_dir() and not any(folder.rglob("parameters*")):
            raise NotTunedError(
                f"{folder} has no parameters yet: kedro run --pipelines={writer} "
                "writes them"
            )

    @property
    def settings(self) -> Settings:
        """All parameters. They are parsed on first access, which also adjusts the
        registered pipelines to them, because Kedro-Viz calls no hook that could do so.
        Raises SettingsError if a parameter is invalid."""
        state = repr((self.env, self.runtime_params))
        if state not in self._parsed:
            found = with_absolute_paths(parse_settings(self._read("parameters")))
            fit_pipelines(found)
            self._parsed[state] = found
        return self._parsed[state]

    def layers(self) -> dict[str, dict[str, Any]]:
        """Return the parameters of each layer, keyed by source (such as `conf/local` or
        `command line`). Later layers override earlier ones."""
        given, self.runtime_params = self.runtime_params, {}
        names = [self.base_env, *self._environments()]
        try:
            found = {f"conf/{name}": self.folder(name, "parameters") for name in names}
        finally:
            self.runtime_params = given
        return {**found, "command line": given or {}}

    def __getitem__(self, key: str) -> dict[str, Any]:
        """Return the configuration for `key`. Parameter groups include all defaults,
        but ungrouped parameters are included only if they are set."""
        found = self._read(key)
        if key != "parameters":
            return found
        for name, value in self.settings.model_dump().items():
            if name in found or isinstance(getattr(self.settings, name), SettingsModel):
                found[name] = value
        return found

    def __setitem__(self, key: str, value: Any) -> None:
        self._parsed.clear()
        super().__setitem__(key, value)

    def _read(self, key: str) -> dict[str, Any]:
        environments = self._environments()
        if key in self or len(environments) < 2 or key not in self.config_patterns:
            return super().__getitem__(key)
        found = self.folder(self.base_env, key)
        for name in environments:
            found = self._merged_over(found, name, key)
        return found or super().__getitem__(key)

    def _environments(self) -> list[str]:
        """Return the environments that are merged over conf/base, in order of
        increasing priority. If conf/ is an archive, conf/local is not included, as in
        Kedro."""
        env = self.env or self.default_run_env
        if env == self.base_env:
            return []
        conf = Path(self.conf_source)
        if not conf.is_dir():
            return [env]
        local = self.default_run_env
        under = [local] if (conf / local).is_dir() else []
        return list(dict.fromkeys([*under, self._measured_environment() or env, env]))

    def _measured_environment(self) -> str | None:
        """Return the environment in which `tuned` or `best` was measured."""
        name = str(self.env)
        if name not in WRITERS or not Path(self.conf_source, name).is_dir():
            return None
        found = OmegaConf.select(self._files([name]), f"{name}.environment")
        return str(found) if found else None

    def _files(self, environments: list[str]) -> Any:
        """Return the unresolved parameters in the files of these environments."""
        conf = Path(self.conf_source)
        if conf.is_dir():
            folders = [conf / name for name in environments]
            files = [f for folder in folders for f in sorted(folder.rglob(PARAMETERS))]
            return OmegaConf.merge({}, *map(OmegaConf.load, files))
        # The environments are in the only top-level folder of the archive.
        kind = "zip" if conf.suffix == ".zip" else "tar"
        archive = fsspec.filesystem(kind, fo=str(conf))
        found = {name: PurePosixPath(name) for name in sorted(archive.find(""))}
        texts = [
            archive.cat_file(name).decode()
            for environment in environments
            for name, path in found.items()
            if environment in path.parts[1:2] and path.match(PARAMETERS)
        ]
        return OmegaConf.merge({}, *map(OmegaConf.create, texts))

    def _merged_over(
        self, under: dict[str, Any], name: str, key: str
    ) -> dict[str, Any]:
        over = self.folder(name, key)
        if self.merge_strategy.get(key) != "soft":
            return {**under, **over}
        merged = OmegaConf.merge(under, over)
        return dict(OmegaConf.to_container(merged))  # type: ignore[arg-type]

    def folder(self, name: str, key: str) -> dict[str, Any]:
        """Return the configuration for `key` from the files of one environment."""
        found: dict[str, Any] = self.load_and_merge_dir_config(
            str(Path(self.conf_source) / name),
            self.config_patterns[key],
            key,
            set(),
            key == "credentials",
        )
        return found


def loader_of(context: KedroContext) -> ProjectConfigLoader:
    """Return the configuration loader of `context`. Raises SettingsError if it is not a
    ProjectConfigLoader."""
    if isinstance(context.config_loader, ProjectConfigLoader):
        return context.config_loader
    raise SettingsError(
        "settings.py has flatout's hooks without its CONFIG_LOADER_CLASS: write "
        "from flatout.settings import * at its beginning"
    )


def credentials_of(context: KedroContext, name: str) -> dict[str, Any]:
    """Return the credentials with this name, or an empty dict if there are none."""
    try:
        known: dict[str, Any] = context.config_loader["credentials"]
    except MissingConfigException:
        return {}
    return known.get(name) or {}


def with_absolute_paths(settings: Settings) -> Settings:
    """Return `settings` with all paths made absolute from the project root.

    A checkpoint name is treated as a path if the project has a folder of that name.
    """
    if Path(project_path()) == Path.cwd():
        return settings
    places = ((path, attrgetter(path)(settings)) for path in in_role(PATH))
    changed = {
        path: project_path(place)
        for path, place in places
        if isinstance(place, str) and place and "://" not in place
    }
    checkpoint = settings.model.name_or_path
    if checkpoint and Path(project_path(checkpoint)).is_dir():
        changed["model.name_or_path"] = project_path(checkpoint)
    return settings.changed(changed)
