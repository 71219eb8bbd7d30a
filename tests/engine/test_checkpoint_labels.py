"""Heads of checkpoints whose labels have other names, orders or meanings."""

import logging

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    LlamaConfig,
    RobertaConfig,
)

from flatout.engine.models.building import build
from flatout.engine.parameters import ModelSettings
from flatout.engine.tasks import make_task
from tests.engine.families import CONFIGS, VOCABULARY

AUTO = {
    "sequence-classification": AutoModelForSequenceClassification,
    "multi-label-classification": AutoModelForSequenceClassification,
    "regression": AutoModelForSequenceClassification,
    "token-classification": AutoModelForTokenClassification,
}
KINDS = {"bert": BertConfig, "roberta": RobertaConfig, "llama": LlamaConfig}
IDS = torch.tensor([[1, 9, 8, 7, 6, 2]])


def checkpoint(folder, task, names=None, family="bert", **config):
    """Save a checkpoint of plain transformers with random weights and a nonzero bias in
    its head."""
    torch.manual_seed(3)
    named = {"id2label": dict(enumerate(names))} if names else {}
    made = KINDS[family](vocab_size=100, **CONFIGS[family], **named, **config)
    model = AUTO[task].from_config(made)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    return AUTO[task].from_pretrained(folder).eval()


def trained_on(folder, task, names):
    """Return the initial model of a training run of `task` on these labels."""
    settings = ModelSettings(task=task, name_or_path=str(folder))
    return build(settings, make_task(settings, names), VOCABULARY, 24).eval()


def logits(model):
    with torch.no_grad():
        return model(IDS, attention_mask=torch.ones_like(IDS)).logits


@pytest.mark.parametrize("family", list(KINDS))
@pytest.mark.parametrize("task", [t for t in AUTO if t != "regression"])
def test_rows_of_a_head_follow_the_names_of_their_labels(tmp_path, task, family):
    if (task, family) == ("multi-label-classification", "llama"):
        pytest.skip("the head of sequence-classification")
    then = checkpoint(tmp_path, task, ["pos", "neg", "none"], family)
    model = trained_on(tmp_path, task, ["none", "pos", "neg"])
    assert model.config.id2label == {0: "none", 1: "pos", 2: "neg"}
    torch.testing.assert_close(logits(model), logits(then)[..., [2, 0, 1]])


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (["POSITIVE", "NEGATIVE"], ["negative", "positive"]),
        (["LABEL_1", "LABEL_0"], ["0", "1"]),
    ],
)
def test_names_match_in_other_letters_and_as_numbers(tmp_path, then, now):
    plain = checkpoint(tmp_path, "sequence-classification", then)
    model = trained_on(tmp_path, "sequence-classification", now)
    torch.testing.assert_close(logits(model), logits(plain)[..., [1, 0]])


@pytest.mark.parametrize("task", [t for t in AUTO if t != "regression"])
@pytest.mark.parametrize("then", [["a", "b"], None, ["LABEL_0", "x"], ["a", "b", "c"]])
def test_a_head_of_other_labels_starts_from_scratch_with_a_warning(
    tmp_path, caplog, task, then
):
    plain = checkpoint(tmp_path, task, then)
    with caplog.at_level(logging.WARNING):
        model = trained_on(tmp_path, task, ["b", "c"])
    old, new = plain.classifier.weight[:2], model.classifier.weight
    assert not torch.isclose(new, old).any()
    assert new.std().item() == pytest.approx(0.02, rel=0.5)
    assert model.classifier.bias.tolist() == [0.0, 0.0]
    torch.testing.assert_close(model.bert.state_dict(), plain.bert.state_dict())
    told = " ".join(record.getMessage() for record in caplog.records)
    assert "the data has 'b', 'c': the head does not fit" in told
    assert "so they start from scratch: classifier.bias, classifier.weight" in told


def test_the_same_labels_change_nothing(tmp_path, caplog):
    plain = checkpoint(tmp_path, "sequence-classification", ["a", "b"])
    with caplog.at_level(logging.INFO):
        model = trained_on(tmp_path, "sequence-classification", ["a", "b"])
    assert torch.equal(logits(model), logits(plain))
    assert not [r for r in caplog.records if r.name.startswith("flatout")]


@pytest.mark.parametrize(
    ("kept", "config"),
    [
        (True, {"num_labels": 1}),
        (True, {"num_labels": 1, "problem_type": "regression"}),
        (True, {"id2label": {0: "stars"}, "problem_type": "regression"}),
        (False, {"num_labels": 1, "problem_type": "multi_label_classification"}),
    ],
)
def test_one_output_of_a_regression_is_kept_and_that_of_a_label_is_not(
    tmp_path, kept, config
):
    plain = checkpoint(tmp_path, "regression", **config)
    model = trained_on(tmp_path, "regression", [])
    assert torch.equal(logits(model), logits(plain)) is kept


def test_a_regression_is_no_label_of_one_name(tmp_path):
    plain = checkpoint(tmp_path, "regression", ["a"], problem_type="regression")
    model = trained_on(tmp_path, "multi-label-classification", ["a"])
    assert not torch.equal(model.classifier.weight, plain.classifier.weight)
