"""One optimizer step is the same as in plain PyTorch, however it is divided."""

import math
from dataclasses import replace
from functools import cache
from statistics import mean

import pytest
import torch
from scipy.stats import binom
from torch import nn
from transformers import Trainer

from flatout.engine.benchmark.measuring.driver import Driver
from flatout.engine.ops.attention import PACKED
from flatout.engine.ops.dropout import HashDropout, Noise, drawn_mask, replace_dropout
from flatout.engine.parameters import TrainSettings
from flatout.engine.train.optimizer import (
    Updater,
    build_optimizer,
    set_learning_rate,
)
from flatout.engine.train.recording import health
from flatout.engine.train.recording.report import LogPoint
from flatout.engine.train.setup.assemble import assemble
from flatout.engine.train.step import Stepper, StepSums
from tests.engine.families import CONFIGS, gradient, step_rows, task_model, task_of
from tests.engine.plain import (
    assert_same,
    job_for,
    observed,
    of_pairs,
    parameter_groups,
    plain_training,
    save_start,
    without_targets,
)
from tests.engine.runs import CPU, changed, make_job


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return the initial weights for a task, and ten steps of plain PyTorch."""

    @cache
    def of(task):
        folder = tmp_path_factory.mktemp(task)
        start = save_start(folder / "start", task)
        return start, plain_training(job_for(folder, task, start))

    return of


STRATEGIES = ["fixed", "random", "grouped", "packed"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("task", "budget"),
    [
        ("sequence-classification", 24),  # micro-batches of one or two rows
        ("sequence-classification", 60),
        ("sequence-classification", 4096),
        ("regression", 60),
        ("masked-lm", 60),
        ("causal-lm", 60),
    ],
)
def test_every_strategy_and_budget_trains_as_plain_pytorch(
    tmp_path, plain, task, budget, strategy
):
    """Loss, gradients, rate and norm of ten steps are equal, and so are the final
    weights."""
    start, expected = plain(task)
    job = job_for(tmp_path, task, start, batching=strategy, token_budget=budget)
    found, result = observed(job, CPU)
    assert result.report.strategy == strategy
    assert_same(found, expected)
    assert [p.learning_rate for p in result.history] == found.rates


@pytest.mark.parametrize("strategy", ["random", "packed"])
def test_pairs_of_texts_train_as_plain_pytorch(tmp_path, plain, strategy):
    """The model receives the index of the text to which a token belongs."""
    start, of_one_text = plain("regression")
    job = of_pairs(
        job_for(tmp_path, "regression", start, batching=strategy, token_budget=60)
    )
    expected = plain_training(job)
    assert_same(observed(job, CPU)[0], expected)
    assert abs(expected.losses[0] / of_one_text.losses[0] - 1) > 1e-2


@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": None},
        {"max_grad_norm": 0.1},
        {"max_grad_norm": 0.1, "fused_optimizer": False},
        {"weight_decay": 0.0, "gradient_checkpointing": True},
        {"synchronize_every_step": True, "history": "dataframe"},
        {"rows": 33, "epochs": 4},
    ],
    ids=[
        *("unclipped", "clipped", "unfused", "checkpointed", "slow habits"),
        "a row in every third step",
    ],
)
def test_options_of_the_step_do_what_pytorchs_do(tmp_path, plain, options):
    task = "sequence-classification"
    start, _ = plain(task)
    job = job_for(tmp_path, task, start, token_budget=60, **options)
    assert_same(observed(job, CPU)[0], plain_training(job))


@pytest.mark.parametrize("task", ["causal-lm", "masked-lm"])
@pytest.mark.parametrize(("strategy", "budget"), [("random", 24), ("packed", 4096)])
def test_a_batch_without_targets_is_a_step_by_zero_gradients(
    tmp_path, plain, task, strategy, budget
):
    job = job_for(
        tmp_path, task, plain(task)[0], batching=strategy, token_budget=budget
    )
    job = without_targets(job, step=2)
    found, _ = observed(job, CPU)
    assert (found.losses[2], found.norms[2]) == (0.0, 0.0)
    expected = plain_training(job)
    assert_same(found, expected)
    if strategy == "packed":
        job = changed(job, train={"log_every": 4})
        assert observed(job, CPU)[1].history[0].loss == pytest.approx(
            sum(expected.losses[:4]) / 3, rel=1e-5
        )


def test_a_log_point_holds_the_means_of_its_window(tmp_path, plain):
    task = "sequence-classification"
    start, expected = plain(task)
    job = job_for(tmp_path, task, start, log_every=4, metrics_every=1)
    history = observed(job, CPU)[1].history
    assert [point.step for point in history] == [4, 8, 10]
    rows = [16, 16, 16, 12] * 3
    windows = [slice(0, 4), slice(4, 8), slice(8, 10)]
    for point, window in zip(history, windows, strict=True):
        assert point.loss == pytest.approx(mean(expected.losses[window]), rel=1e-5)
        hits, judged = sum(expected.hits[window]), sum(rows[:10][window])
        assert point.train_accuracy == pytest.approx(hits / judged)
        assert point.epoch == point.step / 4


def stepper(max_norm=1.0, fused=True, rate=0.1, precision="fp32", **options):
    model = task_model("bert", "sequence-classification", PACKED)
    settings = TrainSettings(learning_rate=rate, max_grad_norm=max_norm)
    optimizer = build_optimizer(model, settings, fused=fused, capturable=False)
    updater = Updater(optimizer, max_norm, fused=fused)
    settings = replace(CPU, precision=precision)
    return model, Stepper(model, updater, settings, hits=model.task.hits, **options)


@pytest.mark.parametrize("fused", [True, False])
def test_fp16_trains_as_with_pytorchs_grad_scaler(fused):
    """Two of six steps overflow. Norms, moments and loss scales are equal."""
    model, run = stepper(max_norm=0.5, fused=fused, rate=0.01, precision="fp16")
    settings = TrainSettings()
    plain = task_model("bert", "sequence-classification", "sdpa", whole=True).model
    optimizer = torch.optim.AdamW(
        parameter_groups(plain, settings.weight_decay),
        lr=0.01,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
    )
    scaler = torch.amp.GradScaler("cpu")
    classifiers = (model.model.classifier, plain.classifier)
    padded, packed = (
        step_rows("bert", "sequence-classification", strategy)
        for strategy in ("random", "packed")
    )
    for step in range(6):
        overflows = math.inf if step in (1, 2) else 1.0
        hooks = [
            c.register_forward_hook(lambda *a, by=overflows: a[2] * by)
            for c in classifiers
        ]
        run(packed[step])
        (micro,) = padded[step].micro_batches
        with torch.autocast("cpu", torch.float16):
            loss = plain(
                micro["input_ids"],
                attention_mask=micro["attention_mask"],
                labels=micro["labels"],
            ).loss
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        for hook in hooks:
            hook.remove()
    assert run.scaler.scale.item() == scaler.get_scale() == 2.0**14
    assert run.sums.first_bad_step.item() == StepSums.NEVER
    assert run.sums.last_norm.item() == pytest.approx(norm.item(), rel=1e-2)
    named = dict(plain.named_parameters())
    for name, ours in model.model.named_parameters():
        moments = run.updater.optimizer.state[ours], optimizer.state[named[name]]
        assert moments[0]["step"] == moments[1]["step"] == 4
        for key in ("exp_avg", "exp_avg_sq"):
            mine, theirs = (m[key] for m in moments)
            close = 0.02 * theirs.abs().max().item() + 1e-9
            torch.testing.assert_close(mine, theirs, rtol=0.02, atol=close)


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_overflows_at_every_loss_scale_ends_the_run(tmp_path, fused):
    """In fp16, single steps that overflow are skipped."""
    job = make_job(tmp_path, log_every=5, fused_optimizer=fused)
    trainer = assemble(job, replace(CPU, precision="fp16"))
    trainer.model.model.classifier.register_forward_hook(lambda *a: a[2] * math.nan)
    driver = Driver(trainer)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    halvings = 16  # from 65,536 to 1
    told = f"^step {halvings}: loss or grad.*was not applied. Lower"
    with pytest.raises(health.NonFiniteError, match=told):
        for step in range(20):
            driver.step(trainer.data[step], 0.0)
            assert step < 19
    for ours, kept in zip(trainer.model.parameters(), before, strict=True):
        assert torch.equal(ours, kept)


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


def test_a_cuda_graph_reads_the_rate_where_it_was():
    settings = TrainSettings(learning_rate=1.0)
    optimizer = build_optimizer(nn.Linear(2, 2), settings, fused=True, capturable=True)
    places = [group["lr"] for group in optimizer.param_groups]
    set_learning_rate(optimizer, 0.25)
    for group, place in zip(optimizer.param_groups, places, strict=True):
        assert group["lr"] is place
        assert place == torch.tensor(0.25)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_weight_decay_spares_what_the_hugging_face_trainer_spares(family):
    model = task_model(family, "sequence-classification", "sdpa").model
    found = build_optimizer(model, TrainSettings(), fused=False, capturable=False)
    names = {id(p): name for name, p in model.named_parameters()}
    spared = {
        group["weight_decay"]: {names[id(p)] for p in group["params"]}
        for group in found.param_groups
    }
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    assert spared == {0.01: decayed, 0.0: set(names.values()) - decayed}


def test_hits_are_counted_every_few_steps_from_the_first():
    _, run = stepper(rate=1e-9, metrics_every=3)
    batch = step_rows("bert", "sequence-classification", "packed")[0]
    judged = []
    for step in range(7):
        run(replace(batch, step=step))
        judged.append(int(run.sums.judged))
    rows = batch.num_samples
    assert judged == [rows, rows, rows, 2 * rows, 2 * rows, 2 * rows, 3 * rows]


def in_chance(count, of, share):
    """Return whether `count` of `of` independent draws is likelier than one in 10
    million."""
    low, high = binom.interval(1 - 1e-7, of, share)
    return low <= count <= high


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("hashed", [True, False])
def test_dropout_of_layers_steps_and_places_is_independent(p, hashed):
    """Each of 12 layers in 3 passes keeps the expected fraction. Any two layers, and
    adjacent positions, agree as often as independent draws."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Dropout(p) for _ in range(12)))
    noise = Noise(torch.device("cpu"))
    assert replace_dropout(model, noise if hashed else None) == 12
    masks = []
    for _ in range(3):
        noise.draw()
        masks += [layer(torch.ones(64, 768)) != 0 for layer in model]
    kept, n = torch.stack(masks), 64 * 768
    assert all(in_chance(count, n, 1 - p) for count in kept.sum((1, 2)).tolist())
    flat = kept.flatten(1).float()
    both = (flat @ flat.T)[tuple(torch.triu_indices(36, 36, 1))]
    assert all(in_chance(count, n, (1 - p) ** 2) for count in both.tolist())
    for one, other in (
        (kept[:, :, 1:], kept[:, :, :-1]),
        (kept[:, :, 4:], kept[:, :, :-4]),
        (kept[:, 1:], kept[:, :-1]),
    ):
        assert in_chance(int((one & other).sum()), one.numel(), (1 - p) ** 2)


def test_each_micro_batch_draws_dropout_of_its_own():
    model = task_model("bert", "sequence-classification", PACKED)
    for layer in [m for m in model.modules() if isinstance(m, nn.Dropout)]:
        layer.p = 0.1
    noise, seeds = Noise(torch.device("cpu")), []
    places = replace_dropout(model, noise)
    for layer in [m for m in model.modules() if isinstance(m, HashDropout)]:
        layer.register_forward_hook(lambda own, *_: seeds.append(own.seed.item()))
    optimizer = build_optimizer(model, TrainSettings(), fused=True, capturable=False)
    run = Stepper(model, Updater(optimizer, 1.0, fused=True), CPU, noise=noise)
    data = step_rows("bert", "sequence-classification", "packed", token_budget=60)
    for step in (0, 1):
        run(data[step])
    passes = sum(len(data[step].layout) for step in (0, 1))
    assert passes > 4
    own_by_attention = model.model.config.num_hidden_layers
    assert len(set(seeds)) == len(seeds) == (places - own_by_attention) * passes


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


def test_health_warnings():
    assert task_of("sequence-classification").chance_loss(10) == math.log(10)
    assert task_of("regression").chance_loss(1) is None
    assert health.initial_loss_warning(2.4, math.log(10)) is None
    assert "the first loss is 5.00, chance is 2.30" in health.initial_loss_warning(
        5.0, math.log(10)
    )
    history = [LogPoint(20, 0.4, 399.6, 3.0, 11.0, *[0.0] * 5)]
    assert "the loss is 399.6 at step 20, chance is 2.30: the learning rate of 3" in (
        health.divergence_warning(history, math.log(10)) or ""
    )
    assert health.divergence_warning(history, None) is None
    assert health.divergence_warning([], 2.3) is None
    assert health.cpu_wait_warning(24.0, 2, on_cpu=True) is None
    assert health.cpu_wait_warning(60.0, 1, on_cpu=True) is None
    assert health.cpu_wait_warning(60.0, 2, on_cpu=False) is None
    assert health.cpu_wait_warning(None, 2, on_cpu=True) is None
    assert health.cpu_wait_warning(32.4, 2, on_cpu=True) == (
        "for 32 % of the time this process waited for a core in use by others, and its "
        "2 threads for each other: end those programs, or set runtime.threads: 1"
    )
    assert health.grad_norm_warning([0.5, 1.0, math.inf]) is None
    assert "high: 50 in the median" in health.grad_norm_warning([50.0, 40.0, 60.0])


def test_drawn_dropout_has_two_values_with_a_mean_of_one():
    torch.manual_seed(3)
    mask = drawn_mask(1_000_003, 0.1, torch.zeros(1))
    assert mask.shape == (1_000_003,)
    dropped = round(0.1 * 2**16)
    kept = torch.tensor(2**16 / (2**16 - dropped)).item()
    assert set(mask.unique().tolist()) == {0.0, kept}
    assert in_chance(int((mask == 0).sum()), len(mask), dropped / 2**16)


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
