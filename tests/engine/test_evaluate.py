"""Loss and accuracy of a split, compared with the model in transformers."""

import math
from dataclasses import replace

import pyarrow as pa
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from flatout.engine.launch.launch import run_job
from flatout.engine.machine.runtime import set_up
from flatout.engine.models import model as model_module
from flatout.engine.ops.attention import PACKED
from flatout.engine.rows.tokens import TokenRows
from flatout.engine.train.evaluate import evaluate
from flatout.engine.train.keeping.oom import OutOfMemory
from flatout.engine.train.loop import evaluate_split
from flatout.engine.train.setup.assemble import assemble
from tests.engine.families import step_rows, task_model, token_rows
from tests.engine.runs import CPU, changed, curve, make_job

CASES = [
    ("bert", "sequence-classification"),
    ("llama", "sequence-classification"),
    ("modernbert", "regression"),
    ("modernbert-mean", "sequence-classification"),
    ("roberta", "masked-lm"),
    ("qwen3", "causal-lm"),
    ("gpt2", "causal-lm"),
]


def evaluated(model, task, strategy, budget=60, rows=None):
    data = step_rows(
        model.model.config.model_type,
        task,
        strategy,
        token_budget=budget,
        rows=rows,
    )
    return evaluate(model, data.rows, data.planner, data.collator, CPU)


def test_perplexity_is_e_to_the_mean_loss():
    found = evaluated(task_model("gpt2", "causal-lm", "sdpa"), "causal-lm", "random")
    assert found.metrics["perplexity"] == pytest.approx(math.exp(found.loss))
    other = "sequence-classification"
    found = evaluated(task_model("bert", other, "sdpa"), other, "random")
    assert "perplexity" not in found.metrics


def plain(family, task):
    """Return the loss of transformers over one padded batch of all rows, and the
    correct predictions."""
    model = task_model(family, task, "sdpa", whole=True).model.eval()
    data = step_rows(family, task, "random", token_budget=10**6)
    batch = data.cut(torch.arange(len(data.rows)).numpy(), 0, 0).micro_batches[0]
    labels = batch["labels"]
    ids, mask = batch["input_ids"], batch["attention_mask"]
    if task == "masked-lm":
        labels = torch.full((ids.numel(),), -100)
        labels[batch["target_index"]] = batch["labels"]
        labels = labels.view_as(ids)
    if task == "causal-lm":
        labels = ids.masked_fill(~mask, -100)
    with torch.no_grad():
        out = model(ids, attention_mask=mask, labels=labels)
    logits = out.logits
    if task == "causal-lm":
        logits, labels = logits[:, :-1], labels[:, 1:]
    hits, targets = 0, 0
    if task == "regression":
        return out.loss.item(), None
    pairs = zip(logits.argmax(-1).flatten(), labels.flatten(), strict=True)
    for guess, label in pairs:
        if label != -100:
            targets, hits = targets + 1, hits + int(guess == label)
    return out.loss.item(), hits / targets


@pytest.mark.parametrize("strategy", ["grouped", "packed"])
@pytest.mark.parametrize(("family", "task"), CASES)
def test_an_evaluation_equals_plain_transformers(family, task, strategy, monkeypatch):
    loss, accuracy = plain(family, task)
    model = task_model(family, task, PACKED if strategy == "packed" else "sdpa")
    for targets_at_once in (7, 10**6):
        monkeypatch.setattr(model_module, "LOGITS_AT_ONCE", 100 * targets_at_once)
        found = evaluated(model, task, strategy)
        assert found.loss == pytest.approx(loss, rel=1e-5)
        assert found.accuracy == accuracy
    assert model.training


def test_a_language_models_logits_are_made_for_a_few_targets_at_a_time(monkeypatch):
    monkeypatch.setattr(model_module, "LOGITS_AT_ONCE", 700)
    model = task_model("qwen3", "causal-lm", PACKED)
    sizes = []
    model.model.lm_head.register_forward_hook(lambda *a: sizes.append(a[2].numel()))
    evaluated(model, "causal-lm", "packed", budget=4096)
    assert max(sizes) == 700


@pytest.mark.parametrize("task", ["causal-lm", "masked-lm"])
def test_a_split_without_targets_has_no_loss(task, caplog):
    rows = TokenRows(pa.table({"input_ids": pa.array([[1]] * 3, pa.list_(pa.int32()))}))
    family = "qwen3" if task == "causal-lm" else "bert"
    for strategy in ("grouped", "packed"):
        model = task_model(family, task, PACKED if strategy == "packed" else "sdpa")
        found = evaluated(model, task, strategy, rows=rows)
        assert math.isnan(found.loss) and found.accuracy is None
    assert "the evaluated split has no targets" in caplog.text


class FullOnce:
    """Simulates running out of memory in the first `times` passes of an evaluation."""

    def __init__(self, times=1):
        self.left = times

    def __call__(self, module, inputs, output):
        if type(module).__name__ == "BertEncoder" and not module.training:
            if self.left:
                self.left -= 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")


def test_a_training_outlives_an_evaluation_that_runs_out_of_memory(tmp_path, caplog):
    whole = run_job(make_job(tmp_path / "whole"))
    full = FullOnce()
    handle = register_module_forward_hook(full)
    try:
        result = run_job(make_job(tmp_path / "full", on_oom="shrink"))
    finally:
        handle.remove()
    assert full.left == 0
    text = "out of memory in an evaluation with token budget 120: continuing with 60"
    assert text in caplog.text
    assert curve(result) == curve(whole)
    assert result.report.token_budget == 120  # steps still fit
    assert result.report.test_loss == pytest.approx(whole.report.test_loss, rel=1e-5)


def test_an_evaluation_that_does_not_fit_says_what_to_set(tmp_path):
    job = make_job(tmp_path, on_oom="stop")
    trainer = assemble(job, set_up(job.settings.runtime))
    trainer.model.model.bert.encoder.register_forward_hook(FullOnce(times=9))
    text = r"in an evaluation with token budget 120: set train\.token_budget: 60 "
    trainer.model.train()
    with pytest.raises(OutOfMemory, match=text) as full:
        evaluate_split(trainer, job.validation)
    assert full.value.to_try == {"token_budget": 60}
    job = make_job(tmp_path, on_oom="shrink")
    trainer.job = job
    with pytest.raises(OutOfMemory, match="in an evaluation: one row does not fit"):
        evaluate_split(trainer, job.validation)
    assert trainer.model.training


def test_rows_longer_than_a_shrunken_budget_are_evaluated(tmp_path):
    job = make_job(tmp_path, on_oom="shrink")
    trainer = assemble(job, set_up(job.settings.runtime))
    expected = evaluate_split(trainer, token_rows("sequence-classification", 20))
    trainer.evaluation_budget = 5
    found = evaluate_split(trainer, token_rows("sequence-classification", 20))
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ([0] * 10 + [1] * 10 + [2], "1 rows of the class 'c'"),
        ([0] * 10 + [1] * 11, "0 rows of the class 'c'. Provide"),
        ([1] * 21, "0 rows of the class 'a'"),
        ([0] * 7 + [1] * 7 + [2] * 7, None),
    ],
)
def test_an_accuracy_of_few_rows_is_told(tmp_path, caplog, labels, told):
    job = make_job(tmp_path, max_steps=1)
    table = job.test.table.drop_columns("labels")
    rows = TokenRows(table.append_column("labels", pa.array(labels)))
    job = replace(job, test=rows)
    warnings = run_job(job).report.warnings
    found = [text for text in warnings if "test_accuracy" in text]
    assert len(found) == (told is not None)
    assert all(told in text and text in caplog.messages for text in found)


def test_tasks_without_classes_are_told_of_no_few_rows(tmp_path):
    rows = token_rows("regression", 20)
    job = replace(
        changed(make_job(tmp_path, max_steps=1), model={"task": "regression"}),
        **dict.fromkeys(("train", "validation", "test"), rows),
        label_names=(),
    )
    assert "test_accuracy" not in str(run_job(job).report.warnings)
