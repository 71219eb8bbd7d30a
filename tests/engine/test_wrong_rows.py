"""Wrong rows as plain transformers judges them, and a training that does not notice."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForSequenceClassification

from flatout.engine.files.content_key import file_hash
from flatout.engine.guard.differences import differences
from flatout.engine.launch.launch import run_job
from flatout.engine.machine.runtime import set_up
from flatout.engine.train.setup.assemble import assemble
from flatout.engine.train.wrong_rows import WrongRows
from tests.engine.families import (
    CONFIGS,
    LABEL_NAMES,
    rows_of,
)
from tests.engine.runs import curve, make_job, points, when_logged
from tests.engine.test_guard import run as tracked
from tests.make import task_job

SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]


def word(piece: int) -> str:
    return SPECIAL[piece] if piece < 5 else f"w{piece}"


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    """Token 17 is the word w17."""
    tokenizer = Tokenizer(WordLevel({word(n): n for n in range(100)}, "[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def job_of(folder, task, family, tokenizer_file, **train):
    config = {"model_type": family, **CONFIGS[family]}
    job = task_job(folder, task, config, error_analysis_every=5, **train)
    return replace(job, tokenizer_file=tokenizer_file)


def lines(job) -> list[dict]:
    text = job.metrics_file.with_name("wrong_rows.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def row_tokens(job, row: int) -> list[int]:
    return job.validation.table.column("input_ids")[row].as_py()


def text_of(tokens: list[int]) -> str:
    return " ".join(word(token) for token in tokens)


@pytest.mark.parametrize("strategy", ["packed", "grouped"])
def test_wrong_rows_are_the_worst_by_plain_transformers(
    tmp_path, tokenizer_file, strategy, caplog
):
    caplog.set_level(logging.INFO)
    task = "sequence-classification"
    job = job_of(tmp_path, task, "bert", tokenizer_file, batching=strategy)
    result = run_job(job)
    found = lines(job)
    assert [line["step"] for line in found] == [5] * 5 + [10] * 5 + [12] * 5
    model = AutoModelForSequenceClassification.from_pretrained(result.last_model_folder)
    expected = []
    for row, label in enumerate(job.validation.labels):
        with torch.no_grad():
            logits = model.eval()(torch.tensor([row_tokens(job, row)])).logits
        best = int(logits.argmax())
        loss = float(F.cross_entropy(logits, torch.tensor([label])))
        score = float(logits.softmax(-1).max())
        if best != label:
            expected.append((loss, row, LABEL_NAMES[label], LABEL_NAMES[best], score))
    assert len(expected) >= 5
    worst = zip(found[-5:], sorted(expected, reverse=True)[:5], strict=True)
    for line, (loss, row, *names, score) in worst:
        assert [line[key] for key in ("row", "label", "prediction")] == [row, *names]
        assert line["loss"] == pytest.approx(loss, rel=1e-4)
        assert line["score"] == pytest.approx(score, rel=1e-4)
        words = [token for token in row_tokens(job, row) if token >= 5]
        assert line["text"] == text_of(words)
    told = set(caplog.messages)
    wrong = f"{len(expected)} of 20 validation rows predicted wrong"
    assert f"step 12/12  {wrong}: wrong_rows.jsonl" in told


def test_largest_errors_of_a_regression(tmp_path, tokenizer_file):
    job = job_of(tmp_path, "regression", "bert", tokenizer_file)
    result = run_job(job)
    model = AutoModelForSequenceClassification.from_pretrained(result.last_model_folder)
    with torch.no_grad():
        values = [
            model.eval()(torch.tensor([row_tokens(job, row)])).logits.item()
            for row in range(20)
        ]
    errors = np.abs(np.array(values) - job.validation.labels)
    worst = np.argsort(-errors)[:5].tolist()
    found = lines(job)[-5:]
    assert [line["row"] for line in found] == worst
    for line in found:
        assert line["prediction"] == pytest.approx(values[line["row"]], abs=1e-4)
        assert line["label"] == pytest.approx(job.validation.labels[line["row"]])
        assert line["loss"] == pytest.approx(errors[line["row"]] ** 2, rel=1e-3)
        assert line["score"] is None


@pytest.mark.parametrize(
    ("task", "family"), [("causal-lm", "gpt2"), ("masked-lm", "bert")]
)
def test_tasks_with_many_targets_a_row_have_no_looks(tmp_path, task, family):
    job = job_of(tmp_path, task, family, None)
    looks = WrongRows(assemble(job, set_up(job.settings.runtime)))
    assert not any(looks.due(done) for done in range(1, 13))


def test_a_tokenizer_that_did_not_make_the_tokens_decodes_none(tmp_path):
    """The file is read when a training begins, and must know as many tokens."""
    other = Tokenizer(WordLevel({f"x{n}": n for n in range(80)}, "x3"))
    other.save(str(tmp_path / "tokenizer.json"))
    file = str(tmp_path / "tokenizer.json")
    job = job_of(tmp_path / "job", "sequence-classification", "bert", file)
    run_job(job)
    for line in lines(job):
        numbers = list(map(str, row_tokens(job, line["row"])))
        assert line["text"].split() == numbers


@pytest.mark.parametrize("strategy", ["packed", "grouped"])
def test_rows_longer_than_the_token_budget_are_looked_at(tmp_path, strategy):
    """Validation rows may be: those that are trained on alone bound the budget."""

    def looks(budget):
        job = make_job(
            tmp_path / str(budget),
            batching=strategy,
            token_budget=budget,
            error_analysis_every=4,
            config={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        )
        generator = torch.Generator().manual_seed(3)
        rows = torch.randint(5, 100, (6, 40), generator=generator).tolist()
        job = replace(job, validation=rows_of("sequence-classification", rows))
        run_job(job)
        return lines(job)

    pairs = list(zip(looks(24), looks(240), strict=True))
    assert pairs
    for found, expected in pairs:
        for name in ("loss", "score"):
            assert found.pop(name) == pytest.approx(expected.pop(name), rel=1e-4)
        assert found == expected


class FullAbove:
    """Memory does not hold a pass over more than `most` tokens."""

    def __init__(self, most):
        self.most, self.times = most, 0

    def __call__(self, module, inputs, output):
        if output.shape[:2].numel() > self.most:
            self.times += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")


def test_a_look_that_runs_out_of_memory_is_made_in_smaller_parts(tmp_path):
    found = []
    for name, full in (("whole", FullAbove(10_000)), ("parts", FullAbove(60))):
        train = {"batching": "packed", "on_oom": "shrink", "error_analysis_every": 1}
        job = make_job(tmp_path / name, **train)
        trainer = assemble(job, set_up(job.settings.runtime))
        trainer.model.model.bert.embeddings.register_forward_hook(full)
        trainer.model.train()
        job.metrics_file.parent.mkdir()
        WrongRows(trainer).look(1)
        assert trainer.model.training
        found.append([(row["row"], row["prediction"]) for row in lines(job)])
    assert found[0] == found[1] and len(found[0]) == 5
    assert full.times == 1 and trainer.evaluation_budget == 60
    assert trainer.resolved.token_budget == 120  # steps fit as they are


def test_a_training_does_not_notice(tmp_path):
    """Dropout on: weights, losses and points are bit for bit those without."""
    without = make_job(tmp_path / "without")
    looked = make_job(tmp_path / "looked", error_analysis_every=1)
    results = [run_job(job) for job in (without, looked)]
    assert curve(results[0]) == curve(results[1])
    assert points(without) == points(looked)
    for name in ("model_folder", "last_model_folder"):
        first, second = (getattr(r, name) / "model.safetensors" for r in results)
        assert file_hash(first) == file_hash(second)
    assert not without.metrics_file.with_name("wrong_rows.jsonl").exists()
    assert {line["step"] for line in lines(looked)} == set(range(1, 13))


def test_a_resumed_run_writes_each_look_once(tmp_path):
    every_2 = {"checkpoint": {"every_steps": 2}, "error_analysis_every": 1}
    whole = make_job(tmp_path / "whole", **every_2)
    run_job(whole)
    job = make_job(tmp_path / "crashed", **every_2)
    with pytest.raises(KeyboardInterrupt), when_logged("step 6/12  loss", _interrupt):
        run_job(job)
    with job.metrics_file.with_name("wrong_rows.jsonl").open("a") as file:
        file.write('{"step": 5, "row"')  # cut short by a kill
    assert run_job(job).report.resumed_from_step
    assert lines(job) == lines(whole)


def _interrupt():
    raise KeyboardInterrupt


def test_the_guard_takes_no_look_for_a_cause():
    """Its time is in no window, so it makes no step slower."""
    often = tracked(params={"train.error_analysis_every": "100"})
    seldom = tracked(params={"train.error_analysis_every": "1000"})
    assert differences(seldom, often) == []
