"""A metric, optimizer, schedule and callbacks from a package outside the repository."""

import importlib
import logging
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from flatout.engine.checkpoints.checkpoint_folder import CheckpointError
from flatout.engine.launch.launch import run_job
from flatout.engine.machine.runtime import set_up
from flatout.engine.parameters import Settings, SettingsError, TrainSettings
from flatout.engine.sweep.space import objective
from flatout.engine.tasks import check_options
from flatout.engine.train.loop import train
from flatout.engine.train.optimizer import learning_rate
from flatout.engine.train.setup.assemble import assemble, build_model
from tests.conftest import PROJECT
from tests.engine.runs import (
    NO_DROPOUT,
    crashed,
    curve,
    make_job,
    metrics_of,
    run_forked,
)
from tests.make import plain_logits

PAGE = (PROJECT / "docs/own_parts.md").read_text("utf-8")
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SECOND = """
import os
import torch

TOLD = []

def tell(event, step, values):
    TOLD.append((event, step, values))
    if event == "evaluation":
        return {"doubled": 2 * values["validation_loss"], "train_loss": 7, "text": "a"}

def fail(event, step, values):
    raise RuntimeError("no network")

def leave(event, step, values):
    raise SystemExit(3)

def no_dict(predictions, labels):
    return 0.5

def text(predictions, labels):
    return {"grade": "good"}

def taken(predictions, labels):
    return {"accuracy": 1.0}

def broken(predictions, labels):
    return {"a": predictions.no_such_thing}

def endless(predictions, labels):
    return {"half": 0.5, "endless": float("inf")}

def at(predictions, labels):
    return {"recall@10": 0.5}

def few(predictions, labels):
    raise ValueError("only one class is present")

def negative(step, total_steps):
    return -1

def one_sided(step, total_steps):
    return 1.0 if os.environ.get("RANK") == "0" else -1

def grows_late(step, total_steps):
    return None if step > 8 else 1.0

def fails_late(step, total_steps):
    return 1 / (11 - step)

def one_argument(step):
    return 1.0

class Unmade:
    def __init__(self):
        raise OSError("no such device")

    def __call__(self, event, step, values):
        pass

class Silent:
    pass

class Counting(torch.optim.SGD):
    '''Keeps plain numbers, as some optimizers do.'''

    def step(self):
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["share"] = state.get("share", 1.0) * 0.5
                p.grad.mul_(1 + state["share"] + 1 / state["count"] + group["seen"])
        super().step()

class Coarse(torch.optim.Optimizer):
    '''State of other types than the parameters.'''

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p, dtype=torch.bfloat16)
                    state["signs"] = torch.zeros_like(p, dtype=torch.uint8)
                    state["step"] = torch.zeros((), dtype=torch.int64)
                state["step"] += 1
                state["mean"].lerp_(p.grad.bfloat16(), 0.1)
                state["signs"] += (p.grad > 0).to(torch.uint8)
                size = state["mean"].float() + 1e-3 * state["signs"].float()
                p.sub_(group["lr"] * size / int(state["step"]))

class NoRate(torch.optim.Optimizer):
    def __init__(self, params, lr):
        values = [p for group in params for p in group["params"]]
        super().__init__(values, {"rate": lr})

    def step(self):
        pass

def nothing(params, lr):
    return None

class Searches(torch.optim.SGD):
    def step(self, closure):
        pass

number = 3
"""


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """The example of the page as `page_parts`, and other parts as `odd_parts.more`."""
    folder = tmp_path / "site"
    (folder / "odd_parts").mkdir(parents=True)
    (folder / "page_parts.py").write_text(EXAMPLE)
    (folder / "odd_parts/__init__.py").touch()
    (folder / "odd_parts/more.py").write_text(SECOND)
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in [n for n in sys.modules if n.startswith(("page_parts", "odd_parts"))]:
        del sys.modules[name]


def runtime_of(job):
    return set_up(job.settings.runtime)


def test_a_training_with_all_parts_of_the_page(parts, tmp_path, capsys):
    job = make_job(
        tmp_path,
        compute_metrics="page_parts.balanced",
        metric="balanced_accuracy",
        optimizer="page_parts.Lion",
        optimizer_options={"betas": [0.95, 0.98]},
        schedule="page_parts.triangle",
        callbacks=["page_parts.Minutes"],
        learning_rate=1e-3,
    )
    result = train(job, runtime_of(job))
    report, found = result.report.as_dict(), metrics_of(job)
    best = max(found["validation_balanced_accuracy"].values())
    assert report["validation_balanced_accuracy"] == best
    assert report["test_balanced_accuracy"] == recall(job, result.model_folder)
    assert found["test_balanced_accuracy"] == {12: report["test_balanced_accuracy"]}
    assert found["minutes"].keys() == {3, 4, 6, 8, 9, 12}
    assert f"{result.model_folder}: test loss {report['test_loss']:.3f}" in (
        capsys.readouterr().out
    )
    assert result.report.phases_s["callbacks"] >= 0
    rates = [point.learning_rate for point in result.history]
    module = importlib.import_module("page_parts")
    shares = [module.triangle(point.step - 1, 12) for point in result.history]
    assert rates == pytest.approx([1e-3 * share for share in shares])


def recall(job, folder) -> float:
    """Return the recall of the saved model on the test rows, computed row by row."""
    answers = [int(logits.argmax()) for logits in plain_logits(folder, job.test)]
    labels = job.test.labels_of(np.arange(len(job.test)))
    right = np.array(answers) == labels
    return float(np.mean([right[labels == one].mean() for one in np.unique(labels)]))


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("torch.optim.NAdam", {"betas": (0.8, 0.9)}),
        ("page_parts.Lion", {}),
    ],
)
def test_ten_steps_of_an_optimizer_equal_plain_pytorch(parts, tmp_path, path, options):
    job = make_job(
        tmp_path,
        config=NO_DROPOUT,
        optimizer=path,
        optimizer_options=options,
        schedule="constant",
        warmup_fraction=0,
        weight_decay=0.1,
        max_grad_norm=None,
    )
    trainer = assemble(job, runtime_of(job))
    torch.manual_seed(job.settings.runtime.seed)
    plain = build_model(job)
    module, _, name = path.rpartition(".")
    matrices = [p for p in plain.parameters() if p.dim() > 1]
    others = [p for p in plain.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    kind = getattr(importlib.import_module(module), name)
    optimizer = kind(groups, lr=1e-3, **options)
    for step in range(10):
        row_ids = trainer.data.batches.rows(step)
        labels = torch.tensor(job.train.labels_of(row_ids))
        logits = [
            plain(input_ids=torch.tensor([view.tolist()])).logits
            for view in job.train.views(row_ids)
        ]
        optimizer.zero_grad()
        loss = F.cross_entropy(torch.cat(logits), labels)
        loss.backward()
        optimizer.step()
        trainer.stepper(trainer.data[step])
        found = float(trainer.stepper.sums.last_loss)
        assert found == pytest.approx(loss.item(), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("optimizer", ["Counting", "Coarse"])
def test_an_optimizer_goes_on_after_a_crash_as_if_there_had_been_none(
    parts, tmp_path, optimizer
):
    optimizer = f"odd_parts.more.{optimizer}"
    given = {"optimizer": optimizer, "checkpoint": {"every_steps": 2}}
    whole = run_job(make_job(tmp_path / "whole", **given))
    job = make_job(tmp_path / "cut", **given)
    crashed(job, "step 9/12  loss")
    result = run_job(job)
    assert result.report.resumed_from_step
    assert curve(result) == curve(whole)


def test_a_schedule_is_lambda_lrs(parts):
    settings = TrainSettings(learning_rate=3e-4, schedule="page_parts.triangle")
    triangle = importlib.import_module("page_parts").triangle
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    plain = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: triangle(s, 20))
    for step in range(20):
        assert learning_rate(settings, step, 20) == pytest.approx(
            optimizer.param_groups[0]["lr"], rel=1e-12
        )
        optimizer.step()
        plain.step()


def test_callbacks_are_told_of_each_event_and_end_no_training(parts, tmp_path, caplog):
    paths = [f"odd_parts.more.{name}" for name in ("fail", "tell", "leave")]
    every = {"checkpoint": {"every_steps": 4, "every_minutes": None}}
    job = make_job(tmp_path, callbacks=paths, **every)
    caplog.set_level(logging.WARNING)
    result = train(job, runtime_of(job))
    told = importlib.import_module("odd_parts.more").TOLD
    events = [(event, step) for event, step, _ in told]
    assert [e for e in events if e[0] == "log"] == [("log", n) for n in (3, 6, 9, 12)]
    assert [s for e, s in events if e == "evaluation"] == [4, 8, 12]
    assert {s for e, s in events if e == "checkpoint"} <= {4, 8, 12}
    assert events[-1] == ("end", 12)
    by_event = {event: values for event, _, values in told}
    assert {"train_loss", "learning_rate", "epoch"} <= by_event["log"].keys()
    assert Path(by_event["checkpoint"]["folder"]).parent == job.work_folder
    assert by_event["end"]["test_loss"] == result.report.test_loss
    kinds = {type(v) for values in by_event.values() for v in values.values()}
    assert kinds == {float, str}
    assert "odd_parts.more.fail failed at step 3 (log); the training" in caplog.text
    assert "RuntimeError: no network" in caplog.text
    assert "odd_parts.more.leave failed at step 12 (end)" in caplog.text
    for left_out in ("returns 'text'", "returns train_loss, which is a metric of"):
        assert f"odd_parts.more.tell {left_out}" in caplog.text
    found = metrics_of(job)
    doubled = {n: 2 * v for n, v in found["validation_loss"].items()}
    assert found["doubled"] == doubled
    assert found["train_loss"].keys() == {3, 6, 9, 12} and "text" not in found
    plain = make_job(tmp_path / "plain", **every)
    assert curve(train(plain, runtime_of(plain))) == curve(result)


def test_a_run_is_the_same_run_by_name_and_source_but_for_callbacks(parts, tmp_path):
    given = {"compute_metrics": "page_parts.balanced"}
    given |= {"checkpoint": {"every_steps": 2, "every_minutes": None}}
    job = make_job(tmp_path, **given)
    crashed(job, "step 6/12  loss")
    file = parts / "page_parts.py"
    file.write_text(EXAMPLE.replace("np.mean(recalls)", "np.max(recalls)"))
    with pytest.raises(CheckpointError, match=r"code of page_parts: '\w+' -> '\w+'"):
        run_job(job)
    file.write_text(EXAMPLE)
    other = make_job(tmp_path, **given, callbacks=["odd_parts.more.tell"])
    assert run_job(other).report.resumed_from_step == 4


BAD = {
    "optimizer": {
        "nowhere.at.All": "cannot be imported",
        "odd_parts.more.number": "'int' object is not callable",
        "odd_parts.more.negative": "unexpected keyword argument 'lr'",
        "odd_parts.more.nothing": "'NoneType' object has no attribute 'step'",
        "odd_parts.more.NoRate": "its param_groups have no lr, which flatout sets",
        "odd_parts.more.Searches": "missing a required argument: 'closure'",
        "torch.optim.LBFGS": "cannot optimise the model's parameters in 2 groups",
    },
    "schedule": {
        "odd_parts.more.one_argument": "takes 1 positional argument but 2 were given",
        "odd_parts.more.negative": r"negative\(0, 12\) gives -1",
        "odd_parts.more.grows_late": r"grows_late\(9, 12\) gives None",
        "odd_parts.more.fails_late": r"fails_late\(11, 12\) fails: ZeroDivision",
    },
    "compute_metrics": {
        "odd_parts.nothing.at_all": "cannot be imported",
        "odd_parts.more.negative2": "cannot be imported",
        "odd_parts.more.one_argument": "takes 1 positional argument but 2 were given",
        "odd_parts.more.no_dict": "returns float, not a dict of numbers",
        "odd_parts.more.text": "returns 'grade': 'good': give a number",
        "odd_parts.more.taken": "returns accuracy, which is a metric of flatout's",
        "odd_parts.more.at": "'recall@10': use letters, digits",
        "odd_parts.more.broken": r"fails on 20 validation rows \(AttributeError",
    },
    "callbacks": {
        "my_ev": "it names no module.: give the dotted path",
        "odd_parts.more.one_argument": "cannot be called: too many positional",
        "odd_parts.more.Unmade": "cannot be called: no such device",
        "odd_parts.more.Silent": "is not a callable object",
    },
}


@pytest.mark.parametrize(
    ("parameter", "path"), [(name, path) for name in BAD for path in BAD[name]]
)
def test_what_cannot_serve_is_refused_before_the_first_step(
    parts, tmp_path, parameter, path
):
    value = [path] if parameter == "callbacks" else path
    job = make_job(tmp_path, **{parameter: value})
    with pytest.raises(
        SettingsError, match=f"train.{parameter}: .*{BAD[parameter][path]}"
    ):
        train(job, runtime_of(job))
    assert not job.metrics_file.exists()


def test_a_metric_that_no_function_returns_is_refused(parts, tmp_path):
    given = {"compute_metrics": "page_parts.balanced", "metric": "balanced_acuracy"}
    job = make_job(tmp_path, **given)
    with pytest.raises(SettingsError, match="did you mean balanced_accuracy"):
        train(job, runtime_of(job))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("endless", "train.compute_metrics: endless is inf and left out"),
        ("few", "few fails on 20 rows (ValueError: only one class is present)"),
    ],
)
def test_figures_that_are_none_are_left_out(parts, tmp_path, caplog, name, said):
    job = make_job(tmp_path, compute_metrics=f"odd_parts.more.{name}")
    report = train(job, runtime_of(job)).report.as_dict()
    assert said in caplog.text
    own = {n for n in report if n in ("validation_half", "validation_endless")}
    assert own == ({"validation_half"} if name == "endless" else set())


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"optimizer_options": {"eps": 1}}, "for adamw set learning_rate"),
        ({"greater_is_better": True}, "is for a metric of compute_metrics"),
        (
            {"optimizer": "a.B", "optimizer_options": {"lr": 1}},
            "optimizer_options: lr is train.learning_rate here",
        ),
        ({"schedule": "quadratic"}, "'cosine', 'constant' or 'wsd', or a dotted path"),
    ],
)
def test_settings_that_do_not_fit_one_another_are_refused(train, said):
    with pytest.raises(ValidationError, match=said):
        TrainSettings.model_validate(train)


def test_predictions_of_a_vocabulary_are_refused(parts):
    model = {"task": "masked-lm", "config": {"model_type": "bert"}}
    own = {"compute_metrics": "page_parts.balanced"}
    with pytest.raises(SettingsError, match="a score for each piece"):
        check_options(Settings.model_validate({"model": model, "train": own}))


@pytest.mark.parametrize(
    ("name", "given", "higher"),
    [("gain", None, True), ("own_loss", None, False), ("gain", False, False)],
)
def test_the_sweep_knows_whether_higher_is_better(name, given, higher):
    own = {"compute_metrics": "a.b", "metric": name, "greater_is_better": given}
    settings = Settings.model_validate({"train": own})
    assert objective(settings) == (f"validation_{name}", higher)


@pytest.mark.process
@pytest.mark.slow
def test_two_ranks_count_the_predictions_of_both(parts, tmp_path):
    given = {
        "compute_metrics": "page_parts.balanced",
        "schedule": "page_parts.triangle",
        "callbacks": ["page_parts.Minutes"],
        "config": NO_DROPOUT,
        "max_steps": 4,
    }
    one = run_job(make_job(tmp_path / "one", **given)).report.as_dict()
    job = make_job(tmp_path / "two", **given, distributed={"num_processes": 2})
    report = run_forked(job).report.as_dict()
    assert report["world_size"] == 2
    for name in ("validation_balanced_accuracy", "test_balanced_accuracy"):
        assert report[name] == pytest.approx(one[name], abs=1e-6)
    assert metrics_of(job)["minutes"].keys() >= {3, 4}


@pytest.mark.process
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("part", ["negative", "one_sided"])
def test_ranks_refuse_a_part_without_their_tracebacks(parts, tmp_path, capfd, part):
    """`negative` fails on both ranks, and `one_sided` only on one of them."""
    two = {"distributed": {"num_processes": 2}}
    job = make_job(tmp_path, schedule=f"odd_parts.more.{part}", **two)
    with pytest.raises(SettingsError, match=rf"{part}\(0, 12\) gives -1"):
        run_job(job)
    told = capfd.readouterr().err
    assert "12 steps of 16 samples" in told
    assert not re.search("Traceback|Error|exitcode", told), told


def test_a_lower_figure_can_be_the_best(parts, tmp_path):
    job = make_job(
        tmp_path,
        compute_metrics="page_parts.balanced",
        metric="balanced_accuracy",
        greater_is_better=False,
        evaluate_every=1,
    )
    report = train(job, runtime_of(job)).report.as_dict()
    found = metrics_of(job)["validation_balanced_accuracy"]
    assert report["validation_balanced_accuracy"] == min(found.values())


def test_without_callbacks_nothing_is_called(tmp_path):
    job = make_job(tmp_path, max_steps=2)
    result = train(replace(job), runtime_of(job))
    assert "callbacks" not in result.report.phases_s
