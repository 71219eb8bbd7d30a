"""Check commands in documents: parse them as the program does, and compare them with
the project's pipelines, environments, parameters, targets and modules."""

import ast
import importlib.util
import re
import shlex
import subprocess
from argparse import Namespace
from collections.abc import Callable
from functools import cache

import click
from kedro.framework.cli.cli import KedroCLI
from kedro.framework.project import pipelines
from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project

from tests.documents import PROJECT, commands, documents

COMMANDS = [command for path in documents() for command in commands(path)]
OTHER_PLUGINS = {
    word.removeprefix("kedro-")
    for command in COMMANDS
    for word in command.text.split()
    if command.text.startswith("pip install") and word.startswith("kedro-")
}
"""Kedro plugins that a document tells users to install. Their commands are not
checked."""


@cache
def cli() -> KedroCLI:
    bootstrap_project(PROJECT)
    return KedroCLI(PROJECT)


def check_kedro(words: list[str]) -> None:
    """Parse a command as Kedro does, and check its pipelines, environment and
    parameters."""
    command: click.Command = cli()
    context = click.Context(command, info_name="kedro")
    while isinstance(command, (click.Group, click.CommandCollection)) and words:
        name, *words = words
        if name in OTHER_PLUGINS:
            return
        found = command.get_command(context, name)
        assert found is not None, f"kedro has no command {name}"
        context = click.Context(found, info_name=name, parent=context)
        command = found
    options = command.make_context(command.name, words, parent=context.parent).params
    if command.name == "run":
        check_run(options)
    elif options.get("env"):
        check_environment(options["env"])


def check_run(options: dict) -> None:
    asked = [*(options.get("pipelines") or []), options.get("pipeline")]
    pipelines.set_requested(None)
    for name in filter(None, asked):
        assert name in pipelines, f"there is no pipeline {name}"
    env = options.get("env") or "local"
    check_environment(env)
    check_parameters(env, repr(options.get("params") or {}))


WRITTEN = ("tuned", "best")
"""Environments that commands write. They do not exist in a new clone."""


def check_environment(env: str) -> None:
    assert env in WRITTEN or (PROJECT / "conf" / env).is_dir(), (
        f"there is no environment {env}"
    )


@cache
def check_parameters(env: str, parameters: str) -> None:
    """Check parameters with the hook that checks those of every run."""
    env = "local" if env in WRITTEN else env
    extra = ast.literal_eval(parameters)
    with KedroSession.create(PROJECT, env=env, runtime_params=extra) as session:
        session.load_context()


def answer(*command: str) -> str:
    """Return the output of `command`, which must succeed."""
    done = subprocess.run(
        command, cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_make(words: list[str]) -> None:
    for target in words:
        answer("make", "-n", target)


def check_python(words: list[str]) -> None:
    if words[0].endswith(".py"):
        assert (PROJECT / words[0]).is_file(), f"there is no file {words[0]}"
        return
    assert words[0] == "-m", "only python -m and scripts are known here"
    module, rest = words[1], words[2:]
    if module == "kedro":
        check_kedro(rest)
    elif module == "flatout":
        check_kedro(["run", *rest])
    else:
        assert importlib.util.find_spec(module) is not None, f"no module {module}"


def check_pip(words: list[str]) -> None:
    assert words[0] == "install"
    text = " ".join(words)
    if "-c" in words:
        assert (PROJECT / words[words.index("-c") + 1]).is_file()
    project = (PROJECT / "pyproject.toml").read_text()
    extras = project.split("[project.optional-dependencies]")[1].split("\n[")[0]
    for extra in re.findall(r"\.\[(\w+)\]", text):
        assert f"\n{extra} = [" in extras, f"no extra {extra}"


def check_torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    check_launched(get_args_parser().parse_args(words))


def check_accelerate(words: list[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    assert words[0] == "launch"
    check_launched(launch_command_parser().parse_args(words[1:]))


def check_launched(options: Namespace) -> None:
    assert options.module
    check_python(["-m", options.training_script, *options.training_script_args])


def check_source(words: list[str]) -> None:
    """Check that the command activates the environment that `make` creates."""
    folder, _, rest = words[0].rpartition("/bin/")
    assert (words[1:], rest) == ([], "activate"), "only activate is known here"
    assert f"\nBIN := {folder}/bin\n" in (PROJECT / "Makefile").read_text()


def check_file(words: list[str]) -> None:
    (file,) = [word for word in words if word.endswith((".sh", ".yaml"))]
    assert (PROJECT / file).is_file(), f"there is no file {file}"


def check_docker(words: list[str]) -> None:
    assert (PROJECT / "Dockerfile").is_file()
    assert words[0] in {"build", "run"}
    if "kedro" in words:
        check_kedro(words[words.index("kedro") + 1 :])


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "make": check_make,
    "kedro": check_kedro,
    "flatout": lambda words: check_kedro(["run", *words]),
    "python": check_python,
    "pip": check_pip,
    "torchrun": check_torchrun,
    "accelerate": check_accelerate,
    "sbatch": check_file,
    "kubectl": check_file,
    "sky": check_file,
    "docker": check_docker,
    "source": check_source,
}
UNCHECKED = {"databricks", "uv", "nvidia-smi", "tar", "curl", "mlflow", "git", "cd"}


def check_command(text: str) -> None:
    words = [
        word
        for word in shlex.split(text, comments=True)
        if word != "..." and not word.endswith(".tar.gz")  # `kedro package` creates it
    ]
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if "&&" in words:
        place = words.index("&&")
        check_command(shlex.join(words[place + 1 :]))
        words = words[:place]
    if words[0] not in UNCHECKED:
        assert words[0] in CHECKS, f"unknown program {words[0]}"
        CHECKS[words[0]](words[1:])


@cache
def fault_of(text: str) -> str | None:
    try:
        check_command(text)
    except (Exception, SystemExit) as fault:
        return f"{type(fault).__name__}: {fault}"
    return None
