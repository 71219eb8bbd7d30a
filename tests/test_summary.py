"""The summary lines at the end of a training run and of an evaluation."""

import io
import logging

import pytest
import rich
from kedro.io import DataCatalog, MemoryDataset
from kedro.pipeline import Pipeline, node
from kedro.runner import SequentialRunner
from rich.console import Console

from flatout.project.terminal import LevelFormatter, LineHandler, print_lines
from flatout.reports.summary import summary_lines

TRAINED = {
    "validation_loss": 0.9123,
    "validation_accuracy": 0.749,
    "test_loss": 0.7996,
    "test_accuracy": 0.778,
    "samples_per_s": 1444.2,
    "loader_wait_pct": 3.66,
    "peak_reserved_gib": 1.25,
    "steps": 9000,
}
JUDGED = {
    "split": "test",
    "rows": 1203,
    "loss": 0.7996,
    "accuracy": 0.778,
    "majority_label": "pandas",
    "majority_accuracy": 0.1114,
    "never_predicted": ["mlflow", "sympy"],
}
PLACES = {
    "model": "data/06_models/model",
    "report": "data/08_reporting/train_report.json",
}


def test_a_run_ends_with_figures_model_and_what_is_next():
    assert summary_lines(TRAINED, JUDGED, PLACES, run_options=" --env=qwen3") == [
        "trained     9,000 steps at 1,444 samples/s, "
        "compute-bound (loader wait 3.7 %), peak 1.2 GiB",
        "validation  loss 0.9123  accuracy 0.7490",
        "test        loss 0.7996  accuracy 0.7780",
        "            accuracy 0.1114 by always predicting 'pandas'",
        "            never predicted: mlflow, sympy",
        "model       data/06_models/model",
        "report      data/08_reporting/train_report.json",
        "next        kedro run --pipelines=predict --env=qwen3    applies the model",
        "            kedro run --pipelines=benchmark --env=qwen3  "
        "finds faster settings",
        "            kedro flatout ui                             shows the runs",
    ]


def test_a_language_model_is_not_offered_to_predict_which_refuses_it():
    trained = {**TRAINED, "test_perplexity": 12.5}
    assert summary_lines(trained, None, PLACES)[-2:] == [
        "next        kedro run --pipelines=benchmark  finds faster settings",
        "            kedro flatout ui                 shows the runs",
    ]


@pytest.mark.parametrize(
    ("figures", "line"),
    [
        (
            {"accuracy": 0.5, "majority_label": "a, b", "majority_accuracy": 0.25},
            "accuracy 0.2500 by always predicting 'a, b'",
        ),
        (
            {"never_predicted": [f"c{n}" for n in range(9_999)]},
            "never predicted: c0, c1, c2, c3, c4, c5, c6, c7, c8, c9 and 9989 more",
        ),
    ],
)
def test_a_classification_has_lines_to_compare_with(figures, line):
    judged = {"split": "test", "rows": 3, "loss": 0.5, **figures}
    lines = summary_lines(None, judged, {})
    assert lines[1] == f"            {line}"


def test_the_metric_that_chooses_is_shown():
    found = {**dict.fromkeys(("loss", "recall_at_1", "recall_at_5"), 0.5), "mrr": 0.25}
    [line] = summary_lines(None, {"split": "test", **found}, {}, "mrr")
    assert line == "test        loss 0.5000  mrr 0.2500  recall_at_1 0.5000"


def test_steps_without_a_rate_are_bound_by_nothing():
    none = {"samples_per_s": float("nan"), "loader_wait_pct": float("nan")}
    [line, *_] = summary_lines(TRAINED | none, None, PLACES)
    assert line == "trained     9,000 steps, too few for a rate, peak 1.2 GiB"


@pytest.mark.parametrize(
    ("wait_pct", "bound"), [(0.0, "compute"), (9.9, "compute"), (10.0, "loader")]
)
def test_a_training_ends_with_what_bounds_it(wait_pct, bound):
    [line, *_] = summary_lines({**TRAINED, "loader_wait_pct": wait_pct}, None, {})
    assert f"{bound}-bound (loader wait {wait_pct:.1f} %)" in line


def test_a_training_alone_has_its_own_figures_of_the_test_split():
    lines = summary_lines(TRAINED, None, PLACES)
    assert lines[2] == "test        loss 0.7996  accuracy 0.7780"


def test_an_evaluation_alone_trains_nothing_and_shows_no_next_step():
    lines = summary_lines(None, JUDGED, PLACES)
    assert [line.split()[0] for line in lines] == ["test", "accuracy", "never"]


def test_a_terminal_wraps_a_long_message_between_words(monkeypatch):
    path = "/" + "a/very/long/folder" * 5
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(rich, "get_console", lambda: terminal)
    text = f"{'word ' * 30}{path}\n  the next"
    LineHandler().emit(logging.makeLogRecord({"msg": text, "levelno": logging.INFO}))
    first, second, third, last = shown.getvalue().splitlines()
    assert len(first) <= 100 and first.rstrip().endswith("word")
    assert (second[:4], third, last) == ("word", path, "  the next")


def passes(rows):
    return rows


def refuses(rows):
    raise ValueError(f"no {rows}")


def test_a_node_that_fails_is_told_of_by_its_error_alone(caplog):
    print_lines()
    both = Pipeline([node(passes, "rows", "a"), node(refuses, "a", "b")])
    catalog = DataCatalog({"rows": MemoryDataset("rows"), "a": MemoryDataset()})
    with pytest.raises(ValueError, match="no rows"):
        SequentialRunner().run(both, catalog)
    assert "fail" not in caplog.text and "run" not in caplog.text


def test_a_message_is_one_line_and_a_warning_is_named(capsys):
    logger = logging.Logger("of the test")
    handler = LineHandler()
    handler.setFormatter(LevelFormatter("%(message)s"))
    logger.addHandler(handler)
    logger.info("[bold]%s", "word " * 60)
    logger.warning("too slow")
    long, short = capsys.readouterr().out.splitlines()
    assert long == "[bold]" + "word " * 60
    assert short == "WARNING: too slow"
