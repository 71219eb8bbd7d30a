"""One optimizer step: every way of cutting it gives the plain batch's gradient."""

import math

import pytest
import torch
from torch import nn

from flatout.engine import health
from flatout.engine.attention import PACKED
from flatout.engine.batching import GlobalBatches
from flatout.engine.dropout import (
    HashDropout,
    Noise,
    drawn_mask,
    keep_mask,
    replace_dropout,
)
from flatout.engine.environment import Ranks
from flatout.engine.optim import Updater, build_adamw, learning_rate
from flatout.engine.runtime import Runtime
from flatout.engine.settings import TrainSettings
from flatout.engine.step import Stepper, StepSums
from tests.engine.families import gradient, step_rows, task_model

TASKS = {
    "sequence-classification": "bert",
    "regression": "bert",
    "masked-lm": "bert",
    "causal-lm": "llama",
}
CPU = Runtime(torch.device("cpu"), "CPU", "fp32", Ranks(), threads=1)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["fixed", "random", "grouped", "packed"])
def test_strategy_budget_and_world_size_do_not_change_the_gradient(
    task, world_size, strategy
):
    family = TASKS[task]
    plain = gradient(
        task_model(family, task, "sdpa"), [step_rows(family, task, "random")[0]]
    )
    model = task_model(family, task, PACKED if strategy == "packed" else "sdpa")
    for budget in (24, 60, 4096):
        options = {"token_budget": budget, "world_size": world_size}
        ranks = [
            step_rows(family, task, strategy, rank=rank, **options)[0]
            for rank in range(world_size)
        ]
        loss, grads = gradient(model, ranks)
        assert loss == pytest.approx(plain[0], rel=1e-5)
        torch.testing.assert_close(grads, plain[1], rtol=1e-3, atol=1e-6)


def stepper(max_norm=1.0, fused=True, rate=0.1):
    model = task_model("bert", "sequence-classification", PACKED)
    settings = TrainSettings(learning_rate=rate, max_grad_norm=max_norm)
    optimizer = build_adamw(model, settings, fused=fused, capturable=False)
    updater = Updater(optimizer, max_norm, fused=fused)
    return model, Stepper(model, updater, CPU)


@pytest.mark.parametrize("fused", [True, False])
def test_clipping_equals_pytorchs(fused):
    model, run = stepper(max_norm=0.01, fused=fused)
    batch = step_rows("bert", "sequence-classification", "packed")[0]
    run(batch)
    reference, _ = stepper(max_norm=None)
    gradient(reference, [batch])
    settings = TrainSettings(learning_rate=0.1)
    optimizer = build_adamw(reference, settings, fused=False, capturable=False)
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    optimizer.step()
    assert run.sums.last_norm.item() == pytest.approx(norm.item(), rel=1e-5)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_is_not_finite_changes_nothing_and_is_remembered(fused):
    model, run = stepper(fused=fused)
    data = step_rows("bert", "sequence-classification", "packed")
    run(data[0])
    before = [p.detach().clone() for p in model.parameters()]
    hook = model.model.classifier.register_forward_hook(lambda *a: a[2] * math.nan)
    run(data[1])
    hook.remove()
    for ours, kept in zip(model.parameters(), before, strict=True):
        assert torch.equal(ours, kept)
    assert run.sums.first_bad_step.item() == 1
    run(data[2])
    assert run.sums.first_bad_step.item() == 1


def test_sums_are_means_over_the_global_batch():
    model, run = stepper(rate=1e-30)
    batch = step_rows("bert", "sequence-classification", "packed", token_budget=60)[0]
    assert len(batch.micro_batches) > 1
    expected, _ = gradient(model, [batch])
    run(batch)
    assert run.sums.last_loss.item() == pytest.approx(expected, rel=1e-5)
    assert run.sums.judged.item() == 12
    assert run.sums.first_bad_step.item() == StepSums.NEVER


def test_learning_rate_is_a_pure_function_of_the_step():
    settings = TrainSettings(learning_rate=1.0, warmup_fraction=0.2)
    rates = [learning_rate(settings, step, 10) for step in range(10)]
    assert rates == pytest.approx(
        [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
    )
    cosine = TrainSettings(learning_rate=1.0, warmup_fraction=0, schedule="cosine")
    assert learning_rate(cosine, 5, 10) == pytest.approx(0.5)
    constant = TrainSettings(learning_rate=1.0, warmup_fraction=0, schedule="constant")
    assert learning_rate(constant, 9, 10) == 1.0


def test_weight_decay_spares_vectors():
    model, run = stepper()
    groups = run.updater.optimizer.param_groups
    assert {p.dim() for p in groups[0]["params"]} == {2}
    assert groups[0]["weight_decay"] == 0.01
    assert {p.dim() for p in groups[1]["params"]} == {1}
    assert groups[1]["weight_decay"] == 0.0
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))


def test_hash_dropout_keeps_the_right_share_independently():
    noise = Noise(torch.device("cpu"))
    torch.manual_seed(1)
    masks = []
    for _ in range(50):
        noise.draw()
        masks.append(keep_mask(torch.Size((64, 768)), 0.1, noise.seed + 3).float())
    kept = torch.stack(masks)
    assert kept.mean().item() == pytest.approx(0.9, abs=1e-3)
    # Spread of each place's share over 50 draws, as independent draws have it.
    assert kept.mean(0).std().item() == pytest.approx(math.sqrt(0.09 / 50), rel=0.02)
    for one, other in (
        (kept[:, :, 1:], kept[:, :, :-1]),
        (kept[:, 1:], kept[:, :-1]),
        (kept[1:], kept[:-1]),
    ):
        pair = torch.stack([one.flatten(), other.flatten()])
        assert abs(torch.corrcoef(pair)[0, 1].item()) < 5e-3


def test_hash_dropout_takes_the_place_of_dropout_and_keeps_the_mean():
    model = torch.nn.Sequential(torch.nn.Dropout(0.25), torch.nn.Dropout(0.0))
    noise = Noise(torch.device("cpu"))
    assert replace_dropout(model, noise) == 1
    assert isinstance(model[0], HashDropout)
    noise.draw()
    out = model(torch.ones(200, 500))
    assert out.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert out.mean().item() == pytest.approx(1.0, abs=0.01)
    assert torch.equal(model(torch.ones(200, 500)), out)  # same seed, same mask
    model.eval()
    assert torch.equal(model(torch.ones(3)), torch.ones(3))


def test_a_bad_step_says_all_that_is_needed():
    bad = health.BadStep(
        step=41,
        row_ids=GlobalBatches(100, 10, seed=0).rows(4),
        learning_rate=0.001,
        loss=math.nan,
        grad_norm=math.inf,
        last_checkpoint=None,
    )
    text = str(bad.error())
    assert text.startswith(
        "step 41: loss or gradient is not finite (last loss nan, gradient norm inf) at "
        "learning rate 0.001; rows of the batch: "
    )
    assert "and 2 more" in text and "there is no checkpoint yet" in text


def test_health_warnings():
    assert health.chance_loss("sequence-classification", 10) == math.log(10)
    assert health.chance_loss("regression", 1) is None
    assert health.initial_loss_warning(2.4, math.log(10)) is None
    assert "the first loss is 5.00, chance is 2.30" in health.initial_loss_warning(
        5.0, math.log(10)
    )
    assert health.cpu_wait_warning(24.0, 2, on_cpu=True) is None
    assert health.cpu_wait_warning(60.0, 1, on_cpu=True) is None
    assert health.cpu_wait_warning(60.0, 2, on_cpu=False) is None
    assert health.cpu_wait_warning(None, 2, on_cpu=True) is None
    assert health.cpu_wait_warning(32.4, 2, on_cpu=True) == (
        "for 32 % of the time this process waited for a core that other programs had, "
        "and 2 threads waited for one another: end those, or set runtime.threads: 1"
    )
    assert health.grad_norm_warning([0.5, 1.0, math.inf]) is None
    assert "median gradient norm 50" in health.grad_norm_warning([50.0, 40.0, 60.0])


def test_drawn_dropout_keeps_the_right_share_and_mean():
    torch.manual_seed(3)
    mask = drawn_mask(1_000_003, 0.1, torch.zeros(1))
    assert mask.shape == (1_000_003,)
    dropped = round(0.1 * 2**16)
    assert set(mask.unique().tolist()) == {
        0.0,
        torch.tensor(2**16 / (2**16 - dropped)).item(),
    }
    assert (mask == 0).float().mean().item() == pytest.approx(0.1, abs=0.001)
    for shift in (1, 2, 4, 128):  # neighbours know nothing of each other
        both = ((mask[:-shift] == 0) & (mask[shift:] == 0)).float().mean().item()
        assert both == pytest.approx(0.01, abs=0.0005)


def test_drawn_dropout_takes_the_place_of_dropout_and_rests_in_evaluation():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Dropout(0.0))
    assert replace_dropout(model, None) == 1
    states = torch.randn(8, 4)
    assert torch.equal(model.eval()[1](states), states)
    torch.manual_seed(1)
    first = model.train()[1](states)
    torch.manual_seed(1)
    assert torch.equal(model[1](states), first)
    assert set((first / states).round(decimals=5).abs().unique().tolist()) == {0.0, 2.0}
