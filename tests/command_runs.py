"""Commands in the documents: which of them a test runs, and why the others are not
run."""

import re
import shlex
import shutil
from pathlib import Path

from tests.command_checks import COMMANDS
from tests.documents import PROJECT
from tests.projects import copied_conf

NOT_RUN = {
    r"make (run|compare|test|slow|check|lint|format|docs)": "installs into .venv "
    "first; tests or CI run what is in its recipe",
    r"make (ui|viz)|kedro flatout ui": "tests/test_servers.py::"
    "test_mlflow_shows_the_run_and_its_rate",
    r"source .*": "changes the shell it is typed into",
    r"git clone .*": "the tests run in a clone",
    r"pip install .*": "downloads packages; CI installs with the same constraints",
    r"docker .*": "needs docker; tests/test_packaging.py follows the Dockerfile",
    r"nvidia-smi": "needs an NVIDIA GPU",
    r"(sbatch|kubectl|uv tool|sky|databricks) .*": "needs a cluster, or a package "
    "apart; tests/test_clusters.py reads the files",
    r".*checkpoint\.mirror=.*": "tests/engine/test_mirror.py::"
    "test_a_new_machine_goes_on_from_the_mirror",
    r".*predict\.shard=.*": "tests/engine/test_predict.py::"
    "test_the_shards_in_order_are_the_whole_bit_for_bit",
    r".*tokenize\.engine=ray": "tests/engine/test_on_ray.py::"
    "test_killed_workers_cost_only_their_parts",
    r"kedro run --pipelines=export.*": "a minute of compilation; "
    "tests/engine/test_export.py exports models",
    r"python deploy/onnx_server.*|curl .*": "tests/engine/test_export.py::"
    "test_the_server_answers_like_predict",
    r"mlflow models serve.*": "tests/test_push.py::"
    "test_mlflow_serves_what_predict_answers",
    r"kedro flatout push.*": "tests/test_push.py::test_a_model_is_pushed_and_read_back",
    r"python docs/parameters_page\.py": "tests/test_parameters.py::"
    "test_the_page_of_all_parameters_is_current",
    r"torchrun .*": "tests/engine/test_launch.py::"
    "test_inside_torchrun_only_rank_0_runs_the_project",
    r"accelerate launch .*": "starts ranks as torchrun does, which a test runs",
    r"CUDA_VISIBLE_DEVICES=0,1 .*": "needs two GPUs",
    r".*distributed\.num_machines=2.*": "tests/engine/test_launch.py::"
    "test_two_machines_train_one_model_and_the_first_has_it",
    r".*distributed\.num_processes=2": "tests/engine/test_distributed.py::"
    "test_two_ranks_go_on_from_a_checkpoint_of_one",
    r"kedro run --pipelines=benchmark.*|kedro run --pipelines=sweep .*": "minutes; "
    "tests/pipelines/ runs a small benchmark and a small sweep from the command line",
    r"kedro run --env=(first_try|low_memory|reproducible)": "trains for minutes; "
    "tests/test_config_loader.py reads each",
    r"kedro run --env=(arrays|deeplog|elmo|images)\b.*": "a minute or more each; "
    "tests/engine and tests/pipelines train them small",
    r"kedro flatout init( .*)?": "tests/test_first_settings.py::"
    "test_what_it_writes_trains",
    r"kedro flatout benchmark .*": "minutes; tests/test_grid_command.py runs it with "
    "settings that are refused before the first trial",
    r"kedro run --params=model\.name_or_path=answerdotai/.*": "downloads a checkpoint",
    r"kedro run --pipelines=(split,tokenize,)?crossvalidate.*": "tests/engine/"
    "test_sweep.py::test_each_setting_is_trained_with_every_seed_or_fold",
    r"kedro run --pipelines=mine": "tests/engine/test_mining.py::"
    "test_negatives_are_those_of_all_products",
    r"kedro run --pipelines=evaluate --params=.*calibrate=true.*": "tests/engine/"
    "test_calibration.py::test_an_overconfident_model_gets_three_times_the_temperature",
    r"kedro flatout verify --env=bert_base": "tests/engine/test_verify.py::"
    "test_sound_steps_are_not_suspected",
    r"kedro run --env=best": "after a sweep; "
    "tests/pipelines/test_sweep.py reads what it writes",
    r"kedro flatout deadline .*": "tests/test_deadline.py::"
    "test_the_command_answers_first",
    r"kedro run --pipelines=sweep": "tests/pipelines/test_sweep.py::"
    "test_a_killed_sweep_goes_on_and_trains_nothing_twice",
    r"kedro run --env=test": "tests/test_project.py::"
    "test_a_run_leaves_the_files_that_scripts_rely_on",
    r"kedro run --pipelines=split": "tests/test_project.py::"
    "test_split_has_a_run_of_its_own",
    r"kedro run --pipelines=train": "tests/test_project.py::"
    "test_a_slow_training_is_told_of_with_what_differs",
    r"kedro run --pipelines=predict": "tests/test_project.py::"
    "test_the_saved_model_predicts",
    r"kedro flatout sync": "tests/test_project.py::"
    "test_a_dead_tracking_server_hurts_nobody",
    r"kedro flatout doctor": "tests/test_doctor.py::"
    "test_a_fail_is_exit_code_1_and_a_table",
    r"kedro flatout rows( --spike.*)?": "tests/engine/test_row_steps.py::"
    "test_the_rows_behind_the_largest_rise",
    r"kedro flatout gate.*": "tests/engine/test_gate.py::"
    "test_a_broken_rate_of_learning_and_a_slow_step_are_found",
    r"kedro doctor --json": "tests/test_doctor.py::test_a_row_a_check_as_json",
    r"kedro viz run( --env=images)?": "tests/test_servers.py::"
    "test_kedro_viz_shows_each_pipeline",
    r"kedro airflow .*": "tests/test_airflow.py::test_the_export_has_one_task_for_it",
    r"kedro package|tar .*|flatout|flatout --conf-source.*": "tests/test_packaging.py::"
    "test_the_wheel_trains_anywhere_with_its_archive_of_conf",
    r"python -m .*": "measures for minutes, or is started by the benchmark; "
    "tests/test_documents.py asks each for --help",
}
"""Maps a pattern of commands to the reason why they are not run as written, or to the
test that runs them with conf/test and its own data folder."""


def plain(text: str) -> str:
    """Return a command without its comment and without `...`, a placeholder for more
    words."""
    return shlex.join(w for w in shlex.split(text, comments=True) if w != "...")


def reason(command: str) -> str | None:
    found = [why for pattern, why in NOT_RUN.items() if re.fullmatch(pattern, command)]
    return found[0] if found else None


EVERY = sorted({plain(command.text) for command in COMMANDS})
RUN = [command for command in EVERY if reason(command) is None]


def small_project(folder: Path, data: Path) -> Path:
    """Create a project with a copy of `data`, whose conf/local has the settings of
    conf/test and of an earlier benchmark."""
    copied_conf(folder)
    for name in ("local", "tuned"):
        shutil.copytree(PROJECT / "conf" / "test", folder / "conf" / name)
    for name in ("pyproject.toml", ".telemetry"):
        shutil.copy(PROJECT / name, folder)
    compiled = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PROJECT / "src", folder / "src", ignore=compiled)
    shutil.copytree(data, folder / "data")
    return folder
