"""Optimizers and frozen parts compared with PyTorch's own."""

import copy

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from flatout.engine.launch.launch import run_job
from flatout.engine.machine.runtime import set_up
from flatout.engine.models.adapters import freeze
from flatout.engine.models.flops import ModelFlops
from flatout.engine.parameters import SettingsError, TrainSettings
from flatout.engine.train.optimizer import (
    Updater,
    build_optimizer,
    set_learning_rate,
)
from flatout.engine.train.setup.assemble import assemble
from flatout.engine.train.step import Stepper
from tests.engine.families import built, step_rows, task_model
from tests.engine.runs import crashed, curve, make_job

TASK = "sequence-classification"
RATE = 0.01


def plain_optimizer(name, model):
    """Return an optimizer of PyTorch, with weight decay for matrices only."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    spared = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": spared, "weight_decay": 0.0}]
    groups.append({"params": decayed, "weight_decay": 0.01})
    if name == "sgd":
        return torch.optim.SGD(groups, lr=RATE, momentum=0.9)
    return torch.optim.Adafactor(groups, lr=RATE)


@pytest.mark.parametrize("name", ["sgd", "adafactor"])
def test_steps_are_those_of_pytorchs_optimizer(name):
    model = task_model("bert", TASK, "sdpa")
    plain = copy.deepcopy(model)
    settings = TrainSettings(optimizer=name, learning_rate=RATE)
    optimizer = build_optimizer(model, settings, fused=False, capturable=False)
    updater = Updater(optimizer, 0.5, fused=False)
    other = plain_optimizer(name, plain.model)
    data = step_rows("bert", TASK, "random")
    for step in range(3):
        (micro,) = data[step].micro_batches
        for trained in (model, plain):
            trained.zero_grad()
            (trained(micro)[0] / 12).backward()
        set_learning_rate(optimizer, RATE)
        norm, _ = updater(torch.zeros(()))
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        other.step()
        assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
    found = dict(model.named_parameters())
    torch.testing.assert_close(
        found, dict(plain.named_parameters()), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("name", ["sgd", "adafactor"])
def test_a_resumed_training_has_the_optimizers_state(tmp_path, name):
    settings = {"optimizer": name, "checkpoint": {"every_steps": 2, "keep": 2}}
    settings |= {"token_budget": 240}
    undisturbed = run_job(make_job(tmp_path / "whole", **settings))
    assert f"optimizer {name} has no fused" in str(undisturbed.report.warnings)
    job = make_job(tmp_path / "crashed", **settings)
    crashed(job, "step 9/12  loss")
    result = run_job(job)
    assert result.report.resumed_from_step in range(4, 9)
    assert curve(result) == curve(undisturbed)


def test_frozen_parts_stay_and_have_no_gradient_and_no_state(tmp_path):
    parts = ["embeddings", "encoder.layer.[0-0]"]
    job = make_job(tmp_path, freeze=parts, max_steps=2)
    trainer = assemble(job, set_up(job.settings.runtime))
    whole = assemble(make_job(tmp_path), trainer.runtime)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    seen = []
    layers = trainer.model.model.bert.encoder.layer
    layers[1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    for run in (trainer, whole):
        for module in run.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        run.model.eval()
        run.stepper.set_scalars(run.data[0])
        run.stepper.backward(run.data[0])
    assert not any(hidden.requires_grad for hidden in seen)  # end of the backward pass
    others = dict(whole.model.named_parameters())
    for name, parameter in trainer.model.named_parameters():
        frozen = "embeddings" in name or "layer.0." in name
        assert (parameter.grad is None) == frozen
        if not frozen:
            close = {"rtol": 1e-4, "atol": 1e-7}
            torch.testing.assert_close(parameter.grad, others[name].grad, **close)
    trainer.stepper.update()
    for name, parameter in trainer.model.named_parameters():
        frozen = "embeddings" in name or "layer.0." in name
        assert torch.equal(before[name], parameter) == frozen
        assert (parameter in trainer.optimizer.state) == (not frozen)


def test_flops_of_a_frozen_model_leave_out_what_is_not_computed():
    model = built("bert", TASK)
    whole = ModelFlops.of(model)
    weights = sum(p.numel() for p in model.bert.encoder.parameters() if p.dim() == 2)
    freeze(model, ["bert.embeddings", "encoder.layer.0"])
    half = ModelFlops.of(model)
    assert whole.body == 6 * weights
    # Layer 0 has no backward pass. The first products of layer 1 need no input
    # gradient.
    first = 3 * 16 * 16
    assert half.body == 2 * weights / 2 + 6 * weights / 2 - 2 * first / 3
    assert half.attention == (4 + 8 / 2) * 16 and whole.attention == 12 * 16
    freeze(model, ["bert"])
    assert ModelFlops.of(model).body == 2 * weights
    assert ModelFlops.of(model).attention == 4 * 16


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("embedings", "'embedings' matches no module; did you mean embeddings?"),
        (
            "encoder.layer.7",
            "'encoder.layer.7' matches no module; did you mean encoder?",
        ),
        (".*", "matches all parameters"),
    ],
)
def test_patterns_that_cannot_serve_are_refused(pattern, said):
    with pytest.raises(SettingsError, match=said):
        freeze(built("bert", TASK), [pattern])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer": "lion"}, "'adamw', 'adafactor' or 'sgd'"),
        ({"freeze": ["layer.["]}, "is not a pattern"),
        ({"momentum": 0.5}, "momentum is not used by the optimizer adamw"),
        (
            {"optimizer": "adafactor", "distributed": {"strategy": "fsdp"}},
            "optimizer adafactor needs whole matrices",
        ),
    ],
)
def test_settings_that_cannot_serve_are_refused(settings, said):
    with pytest.raises(ValidationError, match=said):
        TrainSettings.model_validate(settings)


def test_a_step_on_the_fast_path_is_adamws(tmp_path):
    job = make_job(tmp_path)
    trainer = assemble(job, set_up(job.settings.runtime))
    assert isinstance(trainer.stepper, Stepper)
    assert trainer.stepper.updater.fused and trainer.resolved.fused_optimizer
    assert len(trainer.optimizer.param_groups) == 2


@pytest.mark.parametrize("momentum", [0.0, 0.5, None])
def test_momentum_is_the_one_that_is_set(momentum):
    """The value 0 is valid: PyTorch's SGD without momentum has no state."""
    model = nn.Linear(3, 2)
    settings = TrainSettings(optimizer="sgd", momentum=momentum)
    made = build_optimizer(model, settings, fused=False, capturable=False)
    expected = 0.9 if momentum is None else momentum
    assert {group["momentum"] for group in made.param_groups} == {expected}
    model(torch.ones(1, 3)).sum().backward()
    made.step()
    kept = [state.get("momentum_buffer") for state in made.state.values()]
    assert any(buffer is not None for buffer in kept) is bool(expected)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_changes_no_weight(fused, loss):
    """Its gradient may still be finite, for example if a target is masked out later."""
    model = nn.Linear(3, 2)
    before = copy.deepcopy(model.state_dict())
    optimizer = build_optimizer(model, TrainSettings(), fused=fused, capturable=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    norm, finite = Updater(optimizer, 1.0, fused=fused)(torch.tensor(loss))
    assert bool(norm.isfinite()) and not bool(finite)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
