"""Bidirectional language models compared with PyTorch's own LSTM, row by row."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoModelForPreTraining

from flatout.engine.batches.global_batches import Planner
from flatout.engine.families import family_of
from flatout.engine.models import model as models
from flatout.engine.models.building import ModelError, build, load_pretrained
from flatout.engine.models.flops import AttentionPairs, ModelFlops
from flatout.engine.models.memory import count_parameters
from flatout.engine.models.model_keys import model_key_faults
from flatout.engine.parameters import ModelSettings
from flatout.engine.train.evaluate import evaluate
from tests.engine.families import (
    BILM,
    VOCABULARY,
    built,
    rows_of,
    step_rows,
    task_model,
    task_of,
    token_rows,
)
from tests.engine.runs import CPU

TASK = "bidirectional-lm"


def plain_logits(model, ids):
    """Return logits (T, 2, V), computed with the formulas of nn.LSTM on each row and
    its reverse."""
    weights = dict(model.named_parameters())
    scores = weights.get("lm_head.weight", weights["bilm.embeddings.weight"])
    found = []
    for name, order in (("forward", ids), ("backward", ids.flip(0))):
        states = weights["bilm.embeddings.weight"][order]
        for layer in range(model.config.num_hidden_layers):
            own = {
                key.rpartition(".")[2]: value
                for key, value in weights.items()
                if key.startswith(f"bilm.{name}_layers.{layer}.")
            }
            read = plain_lstm(own, states)
            residual = model.config.residual and layer
            states = states + read if residual else read
        states = states if name == "forward" else states.flip(0)
        found.append(states @ scores.T)
    return torch.stack(found, 1)


def plain_lstm(weights, inputs):
    """The LSTM cell of Hochreiter and Schmidhuber with the projection of Sak et al.
    (2014)."""
    cells = weights["weight_hh_l0"].shape[0] // 4
    cell = torch.zeros(cells)
    state = torch.zeros(weights["weight_hh_l0"].shape[1])
    states = []
    for token in inputs:
        gates = weights["weight_ih_l0"] @ token + weights["bias_ih_l0"]
        gates = gates + weights["weight_hh_l0"] @ state + weights["bias_hh_l0"]
        enter, forget, new, out = gates.split(cells)
        cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
        state = out.sigmoid() * cell.tanh()
        if "weight_hr_l0" in weights:
            state = weights["weight_hr_l0"] @ state
        states.append(state)
    return torch.stack(states)


@pytest.mark.parametrize("family", BILM)
def test_scores_are_those_of_two_stacks_that_never_see_their_target(family):
    model = built(family, TASK, "eager").eval()
    ids = torch.tensor([7, 9, 30, 8, 99])
    scores = model(ids[None]).logits[0]
    torch.testing.assert_close(scores, plain_logits(model, ids), rtol=1e-4, atol=1e-6)
    other = ids.clone()
    other[3] = 50
    changed = model(other[None]).logits[0] != scores
    assert changed.any(-1).tolist() == [
        [False, True],
        [False, True],
        [False, True],
        [True, True],
        [True, False],
    ]


@pytest.mark.parametrize("at_once", [2**27, 1_000])
def test_an_evaluation_has_the_figures_of_each_direction(at_once, monkeypatch):
    """With a limit of 1,000, the logits of five positions are computed at a time."""
    monkeypatch.setattr(models, "LOGITS_AT_ONCE", at_once)
    rows, model = token_rows(TASK), task_model("bilm", TASK, "eager")
    data = step_rows("bilm", TASK, "grouped", rows=rows)
    planner = Planner("grouped", 60, 24)
    found = evaluate(model, rows, planner, data.collator, CPU)
    losses, ranks = ([[], []] for _ in range(2))
    for view in rows.views(np.arange(len(rows))):
        ids = torch.tensor(view.tolist())
        with torch.no_grad():
            scores = model.model(ids[None]).logits[0]
        for side, (logits, labels) in enumerate(
            [(scores[:-1, 0], ids[1:]), (scores[1:, 1], ids[:-1])]
        ):
            losses[side] += F.cross_entropy(logits, labels, reduction="none").tolist()
            own = logits.gather(1, labels[:, None])
            ranks[side] += (logits > own).sum(1).tolist()
    figures = {"": (losses[0] + losses[1], ranks[0] + ranks[1])} | {
        f"{name}_": (losses[side], ranks[side])
        for side, name in enumerate(["forward", "backward"])
    }
    assert found.loss == pytest.approx(np.mean(figures[""][0]), rel=1e-5)
    expected = {}
    for name, (loss, rank) in figures.items():
        expected[f"{name}perplexity"] = math.exp(np.mean(loss))
        expected[f"{name}accuracy"] = np.mean(np.array(rank) == 0)
        expected[f"{name}top_5_accuracy"] = np.mean(np.array(rank) < 5)
    assert {"loss", *found.metrics} == {*task_of(TASK).figures}
    assert found.metrics == pytest.approx(expected, rel=1e-5)
    assert 0 < found.metrics["top_5_accuracy"] < 1


def test_rows_of_one_token_have_no_target():
    data = step_rows("bilm", TASK, "grouped", rows=rows_of(TASK, [[7], [8]]))
    batch = data.cut(np.arange(2), 0, 0)
    assert batch.num_targets == 0
    model = task_model("bilm", TASK, "eager")
    loss, _ = model(batch.micro_batches[0])
    loss.backward()
    assert loss == 0
    assert not any(p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("family", BILM)
def test_a_saved_model_loads_with_flatout(family, tmp_path):
    model = built(family, TASK, "eager").eval()
    model.save_pretrained(tmp_path / "model")
    ids = torch.tensor([[5, 6, 7]])
    expected = model(ids).logits
    for again in (
        load_pretrained(tmp_path / "model"),
        AutoModelForPreTraining.from_pretrained(tmp_path / "model"),
    ):
        assert type(again) is type(model)
        torch.testing.assert_close(again.eval()(ids).logits, expected)
        assert all(map(torch.equal, again.parameters(), model.parameters()))
    body = AutoModel.from_pretrained(tmp_path / "model").eval()
    layers = body(ids, output_hidden_states=True).hidden_states
    assert [layer.shape[:3] for layer in layers] == [(1, 3, 2)] * 2


@pytest.mark.parametrize("family", BILM)
def test_weights_and_operations_are_counted(family):
    model = built(family, TASK, "eager")
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    weights = sum(p.numel() for p in model.parameters())
    settings = ModelSettings(task=TASK, config={"model_type": "bilm"})
    assert count_parameters(model.config, settings) == weights
    assert not family_of(model.config).schedule.compiles
    tables = model.bilm.embeddings.weight.numel()
    if not model.config.tie_word_embeddings:
        tables += model.lm_head.weight.numel()
    flops = ModelFlops.of(model)
    assert flops.body == 6 * (matrices - tables)
    assert flops.head == 6 * model.lm_head.weight.numel()
    pairs = AttentionPairs.of(model.config, causal=False)(np.array([5]))
    assert flops.over(5, 8, pairs) == 5 * flops.body + 8 * flops.head


def bilm(**config):
    return ModelSettings(task=TASK, config={"model_type": "bilm", **config})


def built_by(settings):
    return build(settings, task_of(settings.task), VOCABULARY, 24)


def test_sizes_that_cannot_be_are_refused():
    assert model_key_faults(bilm(hidden_size=8)) == []
    [fault] = model_key_faults(bilm(hidden_sizes=8))
    assert "model.config.hidden_sizes" in fault and "hidden_size" in fault
    for config, said in [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 8, "projection_size": 8}, "proj_size"),
        ({"embedding_size": 8, "tie_word_embeddings": True}, "embedding_size of 256"),
    ]:
        with pytest.raises(ModelError, match=said):
            built_by(bilm(**config))


def test_what_conf_base_sets_for_attention_is_left_alone():
    inherited = {"num_attention_heads": 2, "max_position_embeddings": 8}
    config = built_by(bilm(**inherited, intermediate_size=9)).config.to_dict()
    assert not {*inherited, "intermediate_size"} & config.keys()


def test_tasks_and_models_that_do_not_fit_are_refused():
    bert = ModelSettings(task=TASK, config={"model_type": "bert"})
    with pytest.raises(ModelError, match=r"bert does not: set model\.config"):
        built_by(bert)
    for task in ("causal-lm", "sequence-classification"):
        with pytest.raises(ModelError, match=f"no model for task {task}"):
            built_by(bilm().model_copy(update={"task": task}))
