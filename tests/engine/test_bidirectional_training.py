"""Trainings of bidirectional language models against a plain PyTorch loop."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import AutoModelForPreTraining

from flatout.engine.machine.runtime import set_up
from flatout.engine.parameters import RuntimeSettings
from flatout.engine.train.loop import train
from tests.engine.plain import (
    assert_same,
    job_for,
    observed,
    on_two_ranks,
    plain_training,
    save_start,
)
from tests.engine.runs import Crash, crash, curve, when_logged
from tests.engine.test_wrong_rows import (
    documents_of,
    tokenizer_file,  # noqa: F401 - a fixture
    word,
)

TASK = "bidirectional-lm"
CPU = set_up(RuntimeSettings(precision="fp32", threads=1))


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return save_start(tmp_path_factory.mktemp("start") / "model", TASK)


@pytest.fixture(scope="module")
def expected(start, tmp_path_factory):
    return plain_training(job_for(tmp_path_factory.mktemp("plain"), TASK, start))


@pytest.mark.parametrize(
    ("strategy", "budget"), [("fixed", 60), ("random", 4096), ("grouped", 60)]
)
def test_every_strategy_trains_as_plain_pytorch(
    tmp_path, start, expected, strategy, budget
):
    """Loss, gradients, rate and norm of ten steps, and the weights behind them."""
    job = job_for(tmp_path, TASK, start, batching=strategy, token_budget=budget)
    found, result = observed(job, CPU)
    assert result.report.strategy == strategy
    assert_same(found, expected)
    assert result.report.metrics["test_perplexity"] == pytest.approx(
        np.exp(expected.test_loss), rel=1e-4
    )


@pytest.mark.process
def test_two_ranks_train_as_one(tmp_path, start, expected):
    job = job_for(tmp_path / "job", TASK, start, token_budget=60)
    curve_of_two, result = on_two_ranks({"two": job}, tmp_path)["two"]
    assert (result.report.world_size, result.report.strategy) == (2, "grouped")
    assert_same(curve_of_two, expected)


def test_an_interrupted_training_goes_on_bit_for_bit(tmp_path, start):
    options = {"checkpoint": {"every_steps": 2}, "resume": "auto", "token_budget": 60}
    whole = train(job_for(tmp_path / "whole", TASK, start, **options), CPU)
    job = job_for(tmp_path / "crashed", TASK, start, **options)
    with pytest.raises(Crash), when_logged("step 6/10  loss", crash):
        train(job, CPU)
    again = train(job, CPU)
    assert again.report.resumed_from_step in range(2, 7)
    assert curve(again) == curve(whole)


def test_wrong_tokens_of_both_directions(tmp_path, start, tokenizer_file):  # noqa: F811
    """The line's text is all that the model saw: asked again, it says the same."""
    job = job_for(tmp_path, TASK, start, error_analysis_every=5)
    job = replace(job, tokenizer_file=tokenizer_file)
    result = train(job, CPU)
    model = AutoModelForPreTraining.from_pretrained(result.last_model_folder).eval()
    backend = Tokenizer.from_file(tokenizer_file)
    text = job.metrics_file.with_name("wrong_rows.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in lines] == [5] * 5 + [10] * 5
    for line in lines[-5:]:
        seen = backend.encode(line["text"], add_special_tokens=False).ids
        label = int(backend.token_to_id(line["label"]))
        right = line["side"] == "right"
        [row] = documents_of(job, line["row"])
        assert (row[-len(seen) - 1 :] if right else row[: len(seen) + 1]) == (
            [label, *seen] if right else [*seen, label]
        )
        with torch.no_grad():
            logits = model(torch.tensor([seen])).logits[0]
        scores = logits[0, 1] if right else logits[-1, 0]
        assert line["prediction"] == word(int(scores.argmax())) != line["label"]
        loss = float(F.cross_entropy(scores, torch.tensor(label)))
        assert line["loss"] == pytest.approx(loss, rel=1e-4)
