"""A scheduler that turns nodes into tasks runs a whole training in one task."""

import ast
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from kedro.framework.project import pipelines
from kedro.framework.startup import bootstrap_project

from tests.conftest import PROJECT

STAGES = ("split", "tokenize", "train")


def test_training_is_exactly_one_node():
    """Model, reports and history are outputs of one node in `train` and the default
    run."""
    bootstrap_project(PROJECT)
    pipelines.set_requested(None)
    made = {"model", "last_model", "train_report", "train_summary"}
    made |= {"train_history"}
    [node] = pipelines["train"].nodes
    assert (node.short_name, {*node.outputs}) == ("train_model", made)
    training = [n for n in pipelines["__default__"].nodes if made & {*n.outputs}]
    assert training == [node]


@pytest.mark.parametrize(
    ("grouping", "task"),
    [([], "train-train-model"), (["--group-by", "namespace"], "train")],
)
def test_the_export_has_one_task_for_it(tmp_path: Path, grouping: list[str], task: str):
    plugin = pytest.importorskip("kedro_airflow.plugin")
    arguments = ["airflow", "create", "--pipelines", ",".join(STAGES), *grouping]
    done = CliRunner().invoke(
        plugin.commands,
        [*arguments, "--target-dir", str(tmp_path)],
        obj=bootstrap_project(PROJECT),
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    dags = {path.name: path.read_text() for path in tmp_path.glob("*.py")}
    assert {*dags} == {f"flatout_{name}_dag.py" for name in STAGES}
    assert all(ast.parse(dag) for dag in dags.values())
    tasks = re.findall(r'task_id="([^"]+)"', dags["flatout_train_dag.py"])
    assert tasks == [task]
