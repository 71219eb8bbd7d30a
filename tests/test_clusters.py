"""The examples for clusters can be parsed, refer to existing names, and handle signals
as documented."""

import os
import re
import shlex
import signal
import subprocess
import time

import pytest
import yaml

from flatout.engine.parameters import DistributedSettings
from tests.command_checks import fault_of
from tests.conftest import PROJECT

DEPLOY = PROJECT / "deploy"
SLURM = DEPLOY / "slurm.sh"
OF_SLURM = {"$SLURM_NNODES": "2", "$SLURM_NODEID": "1", "$ENDPOINT": "node0:29500"}

SRUN = """case "$*" in *--nodes=1*) exit 0 ;; esac
touch "$STATE/started"
for _ in $(seq 300); do [ -e "$STATE/told" ] && exit 143; sleep 0.05; done
"""
SCANCEL = 'echo "scancel $*" >> "$STATE/log"; touch "$STATE/told"'
SCONTROL = 'if [ "$1" = show ]; then echo node0; else echo "$*" >> "$STATE/log"; fi'


def test_slurm_runs_commands_that_work():
    text = SLURM.read_text().replace("\\\n", "")
    for name, value in OF_SLURM.items():
        text = text.replace(name, value)
    commands = re.findall(r"kedro run (?:\"[^\"]*\"|[^\"'\n])*", text)
    commands = [command for command in commands if "--" in command]
    assert len(commands) == 2
    assert [fault_of(command) for command in commands] == [None, None]
    wanted = DistributedSettings(
        num_machines=2, machine_rank=1, rendezvous_endpoint="node0:29500"
    )
    for name in wanted.model_fields_set:
        value = getattr(wanted, name)
        assert f"train.distributed.{name}={value}" in commands[1]


@pytest.mark.parametrize("pipeline", ["predict", "sweep"])
def test_an_array_of_jobs_runs_commands_that_work(pipeline, tmp_path):
    program = tmp_path / "kedro"
    program.write_text('#!/usr/bin/env bash\necho kedro "$@"\n')
    program.chmod(0o755)
    variables = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "8"}
    variables["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command = subprocess.run(
        ["bash", str(DEPLOY / "slurm_array.sh"), pipeline],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert fault_of(command) is None
    assert ("predict.shard=2/8" in command) == (pipeline == "predict")


def kubernetes() -> str:
    spec = yaml.safe_load((DEPLOY / "trainjob.yaml").read_text())["spec"]
    patch = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    pod = patch["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    return shlex.join([*spec["trainer"]["command"], *spec["trainer"]["args"]])


def skypilot() -> str:
    task = yaml.safe_load((DEPLOY / "sky.yaml").read_text())
    command = task["run"].splitlines()[-1].removeprefix("exec ")
    return command.replace("$MIRROR", task["envs"]["MIRROR"])


def databricks() -> str:
    bundle = yaml.safe_load((DEPLOY / "databricks.yml").read_text())
    (task,) = bundle["resources"]["jobs"]["flatout"]["tasks"]
    wheel, volume = task["python_wheel_task"], bundle["variables"]["volume"]["default"]
    options = [o for o in wheel["parameters"] if not o.startswith("--conf-source")]
    command = shlex.join(["kedro", "run", *options])
    return command.replace("${var.volume}", volume)


@pytest.mark.parametrize("platform", [kubernetes, skypilot, databricks])
def test_a_platform_starts_a_command_that_works(platform):
    assert fault_of(platform()) is None


def test_slurms_signal_reaches_the_steps_and_the_job_comes_back(tmp_path):
    """Run the real script in bash, with commands of Slurm that only record their
    arguments."""
    for name, body in {"srun": SRUN, "scancel": SCANCEL, "scontrol": SCONTROL}.items():
        program = tmp_path / name
        program.write_text(f"#!/usr/bin/env bash\n{body}\n")
        program.chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "STATE": str(tmp_path),
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_JOB_ID": "77",
    }
    script = subprocess.Popen(["bash", str(SLURM)], env={**os.environ, **variables})
    while not (tmp_path / "started").exists():
        assert script.poll() is None
        time.sleep(0.02)
    script.send_signal(signal.SIGTERM)
    assert script.wait(20) == 143
    told = (tmp_path / "log").read_text().splitlines()
    assert told == ["scancel --signal=TERM 77", "requeue 77"]
