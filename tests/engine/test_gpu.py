"""Tests that need a GPU. Measured values are in benchmarks."""

import logging
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import replace
from multiprocessing import get_context

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from flatout.engine.answers.step_check import verify
from flatout.engine.launch.launch import run_job
from flatout.engine.machine.environment import apply
from flatout.engine.machine.runtime import set_up
from flatout.engine.models.compilation import compiled
from flatout.engine.ops.attention import joined_attention
from flatout.engine.ops.row_by_row import Rule
from flatout.engine.parameters import parse_settings
from flatout.engine.train import loop
from flatout.engine.train.loop import train
from flatout.engine.train.setup import memory_fit
from flatout.engine.train.setup.assemble import assemble
from tests.engine.families import (
    CONFIGS,
    LABEL_NAMES,
    VOCABULARY,
    rows_of,
    token_rows,
)
from tests.engine.plain import (
    auto_class,
    job_for,
    plain_training,
    save_start,
    without_targets,
)
from tests.engine.runs import Crash, changed, crash, make_job, when_logged
from tests.engine.test_arrays import job_of as table_job
from tests.engine.test_images import CONVNEXT, RESNET, VIT, job_of as image_job
from tests.engine.test_images_compiled import (
    PLAN,
    assert_two_steps_alike,
    batch_of,
    task_model,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 256,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def gpu_job(folder, *, runtime=None, shape=None, config=None, rows=240, **options):
    options = {
        "global_batch_size": 16,
        "epochs": 4,
        "log_every": 10,
        "learning_rate": 1e-4,
        "compile": True,  # `auto` would not compile for so few steps
        "resume": "never",
        **options,
    }
    config = config or {"model_type": "bert", **SHAPE, **(shape or {})}
    settings = parse_settings(
        {
            "runtime": runtime or {},
            "model": {"config": config},
            "tokenize": {"max_length": 24},
            "train": options,
        }
    )
    job = make_job(folder, rows=rows)
    assert (job.vocabulary, job.label_names) == (VOCABULARY, tuple(LABEL_NAMES))
    return replace(
        job, settings=settings, train=token_rows("sequence-classification", rows)
    )


def run(job):
    apply(job.settings.runtime)
    return train(job, set_up(job.settings.runtime))


@pytest.mark.parametrize(
    "options",
    [
        {"cuda_graphs": True},
        {"cuda_graphs": False},
        {"cuda_graphs": False, "compile": False, "token_budget": 64},
        {"batching": "grouped", "compile": False},
        {"batching": "fixed", "compile": False, "metrics_every": 1},
    ],
    ids=["graphs", "compiled", "micro-batches", "grouped", "fixed"],
)
def test_the_host_waits_for_the_device_at_log_points_alone(
    tmp_path, monkeypatch, options
):
    refused, settled_at = [], 30  # compiled and captured, with memory allocated

    class Watching(loop.Recorder):
        def step_begins(self):
            if len(self.history) * 10 >= settled_at:
                torch.cuda.set_sync_debug_mode("error")
                refused.append(1)
            super().step_begins()

        def log(self, batch, rate):
            torch.cuda.set_sync_debug_mode("default")
            return super().log(batch, rate)

    monkeypatch.setattr(loop, "Recorder", Watching)
    try:
        result = run(gpu_job(tmp_path, **options, evaluate_every=None))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.report.steps == 60
    assert len(refused) == 30


def test_the_fast_path_trains_as_the_plain_one(tmp_path):
    plain = gpu_job(
        tmp_path / "plain",
        runtime={"precision": "fp32", "tf32": False, "attention": "eager"},
        batching="fixed",
        compile=False,
        fused_optimizer=False,
        log_every=1,
    )
    want = run(plain).history
    for name, options in {
        "graphs": {"cuda_graphs": True},
        "compiled": {"cuda_graphs": False, "token_budget": 96},
    }.items():
        fast = run(gpu_job(tmp_path / name, log_every=1, **options)).history
        assert [p.step for p in fast] == [p.step for p in want]
        losses = torch.tensor([[p.loss for p in h] for h in (fast, want)])
        torch.testing.assert_close(losses[0], losses[1], rtol=2e-2, atol=2e-2)
        norms = torch.tensor([[p.grad_norm for p in h][:10] for h in (fast, want)])
        torch.testing.assert_close(norms[0], norms[1], rtol=5e-2, atol=2e-2)


def test_fp16_trains_alike_with_and_without_the_fused_optimizer(tmp_path):
    """The result equals that of bf16. The first steps may overflow and be skipped."""
    options = {"cuda_graphs": False, "learning_rate": 1e-3, "log_every": 1}
    jobs = {
        "bf16": ("bf16", {}),
        "fused": ("fp16", {}),
        "unfused": ("fp16", {"fused_optimizer": False}),
        "graphs": ("fp16", {"cuda_graphs": True}),
    }
    losses = []
    for name, (precision, own) in jobs.items():
        runtime = {"precision": precision, "residual": "fp32"}
        job = gpu_job(tmp_path / name, runtime=runtime, **{**options, **own})
        losses.append(torch.tensor([point.loss for point in run(job).history]))
    assert losses[0][:5].mean() - losses[0][-5:].mean() > 0.01  # the model learns
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0], rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize(
    ("runtime", "options"),
    [
        ({}, {"cuda_graphs": True}),
        ({}, {"cuda_graphs": False, "batching": "grouped", "audit": True}),
        ({"precision": "fp16"}, {"compile": False}),
        ({"precision": "fp32", "tf32": False}, {"compile": False}),
    ],
)
def test_verify_finds_the_step_sound(tmp_path, runtime, options):
    job = gpu_job(tmp_path, runtime=runtime, **options)
    verdict = verify(job, set_up(job.settings.runtime))
    assert verdict.is_sound, "\n".join(verdict.lines())


def test_an_audit_counts_each_pass_in_replayed_steps(tmp_path):
    job = gpu_job(tmp_path, cuda_graphs=True, audit=True, epochs=4)
    train(job, set_up(job.settings.runtime))
    path = job.metrics_file.with_name("suspect_rows.parquet")
    assert set(pq.read_table(path).column("passes").to_pylist()) == {4}


def test_an_evaluation_makes_few_logits_at_a_time(tmp_path):
    """In fp32, the logits would take 8 GiB (14,000 targets, 150,000 pieces)."""
    job = language_model_job(tmp_path, rows=1024, vocab_size=150_000)
    trainer = assemble(job, set_up(job.settings.runtime))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = loop.evaluate_split(trainer, job.validation)
    assert torch.cuda.max_memory_allocated() - before < 3 * 2**30
    assert 11 < found.loss < 13  # ln 150,000


def run_ranks(folder, options):
    """Run this in a process that has not used a GPU."""
    return run_job(gpu_job(folder, log_every=1, **IN_PROPORTION, **options))


def biases(result):
    """Return all biases of the dense layers (N,), which are zero before the first
    step."""
    tensors = load_file(result.last_model_folder / "model.safetensors")
    found = [tensors[name] for name in sorted(tensors) if name.endswith("dense.bias")]
    return torch.cat(found)


IN_PROPORTION = {"learning_rate": 0.1, "adam_epsilon": 1.0, "max_grad_norm": None}
"""Updates are proportional to gradients, so a wrong factor is noticed."""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_exchange_between_graphs_what_one_computes(tmp_path):
    alone = gpu_job(tmp_path / "one", cuda_graphs=False, log_every=1, **IN_PROPORTION)
    one = run(alone)
    alone, moved = one.history, biases(one)
    assert moved.abs().max() > 1e-4  # they start from zero
    for name, options in {
        "graphs": {"cuda_graphs": True},
        "at once": {"cuda_graphs": False, "distributed": {"bucket_mib": "all"}},
        "buckets": {"cuda_graphs": False},
    }.items():
        options["distributed"] = {"num_processes": 2, **options.get("distributed", {})}
        with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
            found = fresh.submit(run_ranks, tmp_path / name, options).result()
        assert found.report.cuda_graphs is options["cuda_graphs"]
        for point, other in zip(found.history, alone, strict=True):
            assert point.loss == pytest.approx(other.loss, rel=2e-2, abs=2e-2)
            if point.step <= 10:
                near = pytest.approx(other.grad_norm, rel=5e-2, abs=2e-2)
                assert point.grad_norm == near
        there = biases(found)
        likeness = torch.nn.functional.cosine_similarity(there, moved, dim=0)
        assert likeness > 0.98
        assert there.norm().item() == pytest.approx(moved.norm().item(), rel=5e-2)


def language_model_job(folder, rows=240, vocab_size=100, **options):
    job = gpu_job(folder, **options)
    config = {"model_type": "qwen3", **CONFIGS["qwen3"], "hidden_size": 64}
    config |= {"head_dim": 32, "vocab_size": vocab_size}
    model = parse_settings({"model": {"task": "causal-lm", "config": config}}).model
    settings = job.settings.model_copy(update={"model": model})
    names = ("train", "validation", "test")
    splits = {name: token_rows("causal-lm", rows) for name in names}
    return replace(job, settings=settings, label_names=(), **splits)


def test_a_language_model_replays_a_few_graphs(tmp_path, caplog):
    """Its batches also differ in their number of targets. One batch has none."""
    losses = []
    for graphs in (True, False):
        job = language_model_job(
            tmp_path / str(graphs), cuda_graphs=graphs, log_every=1
        )
        with caplog.at_level(logging.DEBUG, logger="flatout.engine.train.step"):
            found = run(without_targets(job, step=20))
        assert found.report.cuda_graphs is graphs
        losses.append(torch.tensor([point.loss for point in found.history]))
        assert losses[-1][20] == 0.0
    captured = [r for r in caplog.records if "captured a CUDA graph" in r.message]
    assert 1 <= len(captured) <= 6  # in 57 steps: totals of 256 or 512 tokens
    torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-2)


def test_a_second_start_finds_every_graph_of_the_first(tmp_path):
    """Graphs are traced again, but not differentiated or lowered again."""
    counted = torch._dynamo.utils.counters["aot_autograd"]
    losses = []
    for name in ("first", "second"):
        torch._dynamo.reset()
        counted.clear()
        found = run(gpu_job(tmp_path / name, cuda_graphs=False, log_every=1))
        losses.append(torch.tensor([point.loss for point in found.history]))
    # PyTorch 2.11 loses one of the four, but no graph bypasses the cache.
    assert counted["autograd_cache_hit"] >= 3
    assert counted["autograd_cache_bypass"] == 0
    torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("family", "wider"),
    [
        ("qwen3", {"hidden_size": 64, "head_dim": 32}),
        ("modernbert", {"hidden_size": 64}),
        ("modernbert-mean", {"hidden_size": 64}),
        ("gpt2", {"n_embd": 64}),
    ],
)
def test_other_families_train_on_the_fast_path(tmp_path, family, wider):
    """The results are those of the fp32 path within bf16 rounding (1 % on a CPU)."""
    # With large weights, the loss depends on every layer and is far from that of
    # chance.
    config = {
        "model_type": family,
        **CONFIGS[family],
        **wider,
        "initializer_range": 0.2,
    }
    if family == "gpt2":
        config |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    plain = {"batching": "fixed", "compile": False, "fused_optimizer": False}
    exact = {"precision": "fp32", "tf32": False, "attention": "eager"}
    results = []
    for runtime, options in ((exact, plain), ({}, {})):
        options |= {"epochs": 1, "log_every": 1, "learning_rate": 1e-3}
        place = tmp_path / str(len(results))
        job = gpu_job(place, runtime=runtime, config=config, rows=64, **options)
        results.append(run(job))
    want, found = results
    report = found.report
    assert (report.strategy, report.compile) == ("packed", True)
    assert report.attention == "flatout_rows"
    for point, other in zip(found.history, want.history, strict=True):
        assert point.loss == pytest.approx(other.loss, rel=3e-2)
        assert point.grad_norm == pytest.approx(other.grad_norm, rel=5e-2)


def test_an_interrupted_training_with_graphs_ends_as_an_undisturbed_one(tmp_path):
    """Dropout is on. The tolerance allows for the GPU's arbitrary order of
    additions."""
    shape = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    options = {"cuda_graphs": True, "log_every": 1, "learning_rate": 1e-3}
    options |= {"resume": "auto", "checkpoint": {"every_steps": 10, "keep": 2}}
    jobs = [
        gpu_job(tmp_path / name, shape=shape, **options)
        for name in ("one", "same", "interrupted")
    ]
    with pytest.raises(Crash), when_logged("step 35/60  loss", crash):
        run(jobs[2])
    one, same, resumed = (run(job) for job in jobs)
    assert resumed.report.resumed_from_step in (20, 30)
    assert resumed.report.cuda_graphs
    rates = [[p.learning_rate for p in r.history] for r in (one, resumed)]
    assert rates[0] == rates[1]
    expected, again, found = (
        torch.tensor([[p.loss, p.grad_norm] for p in result.history])
        for result in (one, same, resumed)
    )
    near = max(1e-4, 3 * (again - expected).abs().max().item())
    assert near < 0.1
    torch.testing.assert_close(found, expected, rtol=0.0, atol=near)


EXACT = {"precision": "fp32", "tf32": False, "threads": 1}
"""Settings for fp32 without TF32."""


def on_gpu(job, runtime=EXACT, **train):
    """Return `job` for the GPU."""
    return run(changed(job, runtime=runtime, train=train))


@pytest.mark.parametrize("task", ["next-key", "bidirectional-lm"])
def test_lstms_train_the_same_recorded_as_in_plain_pytorch(tmp_path, task):
    """Ten captured steps are compared with a plain loop on the CPU."""
    start = save_start(tmp_path / "start", task)
    job = job_for(tmp_path, task, start, batching="grouped", token_budget=4096)
    want = plain_training(job)
    found = on_gpu(job, cuda_graphs=True, max_steps=10)
    assert (found.report.cuda_graphs, found.report.strategy) == (True, "grouped")
    history = found.history
    assert [p.loss for p in history] == pytest.approx(want.losses, rel=2e-3)
    assert [p.grad_norm for p in history] == pytest.approx(want.norms, rel=5e-3)


SAMPLES = {"table": None, "vit": VIT, "convnext": CONVNEXT, "resnet": RESNET}
TWELVE_STEPS = {"log_every": 1, "learning_rate": 1e-3, "epochs": 9, "max_steps": 12}
TWELVE_STEPS |= {"resume": "never"}


@pytest.mark.parametrize(
    ("kind", "compiled"),
    [*((kind, False) for kind in SAMPLES), ("vit", True), ("resnet", True)],
)
def test_samples_train_the_same_recorded(tmp_path, kind, compiled):
    """Two of the twelve steps are the smaller last steps of an epoch."""
    histories = []
    for recorded in (False, True):
        folder = tmp_path / str(recorded)
        if kind == "table":
            job = table_job(folder, count=100, **TWELVE_STEPS)
        else:
            job = image_job(folder, SAMPLES[kind], **TWELVE_STEPS)
        result = on_gpu(job, cuda_graphs=recorded, compile=compiled)
        assert result.report.cuda_graphs is recorded
        histories.append(result.history)
    plain, replayed = histories
    assert [p.loss for p in replayed] == pytest.approx(
        [p.loss for p in plain], rel=1e-3
    )
    norms = [p.grad_norm for p in plain]
    assert [p.grad_norm for p in replayed] == pytest.approx(norms, rel=5e-3)


@pytest.mark.parametrize("config", [VIT, CONVNEXT, RESNET], ids=["vit", "next", "res"])
def test_compiled_images_with_fused_parts_have_the_plain_gradient(tmp_path, config):
    """Both are computed in fp32."""
    job, plain = task_model(tmp_path, config)
    batch = {name: tensor.cuda() for name, tensor in batch_of(job).items()}
    model = deepcopy(plain.cuda())
    model.family.fuse(model.model, PLAN)
    with torch.backends.cudnn.flags(allow_tf32=False):
        assert_two_steps_alike(plain, model, compiled(model), batch)


@pytest.mark.parametrize("config", [VIT, CONVNEXT, RESNET], ids=["vit", "next", "res"])
def test_images_train_the_same_compiled_with_fused_parts(tmp_path, config):
    """Crops are included, which a graph computes with indices."""
    histories = []
    for is_compiled in (False, True):
        folder = tmp_path / str(is_compiled)
        job = image_job(folder, config, crop_area=0.5, **TWELVE_STEPS)
        result = on_gpu(job, compile=is_compiled)
        assert result.report.compile is is_compiled
        histories.append(result.history)
    plain, fused = histories
    losses = [p.loss for p in plain]
    assert [p.loss for p in fused] == pytest.approx(losses, rel=5e-3)
    norms = [p.grad_norm for p in plain]
    assert [p.grad_norm for p in fused] == pytest.approx(norms, rel=2e-2)


def run_resnet(folder, ranks):
    """Run this in a process that has not used a GPU."""
    options = {"max_steps": 4, "crop_area": 0.5, "resume": "never"}
    job = image_job(folder, RESNET, distributed={"num_processes": ranks}, **options)
    return run_job(changed(job, runtime=EXACT))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_share_the_statistics_of_batchnorm(tmp_path):
    """SyncBatchNorm gives the losses and running means of a single GPU."""
    found = []
    for ranks in (1, 2):
        with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
            result = fresh.submit(run_resnet, tmp_path / str(ranks), ranks).result()
        weights = load_file(result.last_model_folder / "model.safetensors")
        means = {n: t for n, t in weights.items() if n.endswith("running_mean")}
        found.append(([p.loss for p in result.history], means))
    (losses, means), (shared_losses, shared_means) = found
    assert shared_losses == pytest.approx(losses, rel=1e-3)
    assert means
    for name, mean in means.items():
        torch.testing.assert_close(shared_means[name], mean, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": False, "compile": False}])
def test_measuring_memory_leaves_no_trace(tmp_path, monkeypatch, options):
    """Weights and random generators are the same as without the measurement."""
    found = []
    for plenty in (True, False):
        monkeypatch.setattr(memory_fit, "is_plenty", lambda *_, p=plenty, **__: p)
        job = gpu_job(tmp_path, token_budget="auto", **options)
        trainer = assemble(job, set_up(job.settings.runtime))
        assert (trainer.demand is None) is plenty
        assert all(p.grad is None for p in trainer.model.parameters())
        weights = [p.detach().cpu() for p in trainer.model.parameters()]
        states = [torch.get_rng_state(), torch.cuda.get_rng_state()]
        found.append([*states, *weights])
    for without, measured in zip(*found, strict=True):
        assert torch.equal(without, measured)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_budget_fits_a_card_that_is_small(tmp_path, checkpointing):
    """Steps need the expected memory within 15 %, and none fails."""
    shape = {"hidden_size": 512, "num_hidden_layers": 6, "intermediate_size": 2048}
    shape["num_attention_heads"] = 8
    job = gpu_job(
        tmp_path,
        shape=shape,
        rows=8192,
        runtime={"memory_limit_gib": 1.5},
        global_batch_size=4096,
        max_steps=4,
        token_budget="auto",
        compile=False,
        cuda_graphs=False,
        on_oom="stop",
        gradient_checkpointing=checkpointing,
    )
    try:
        trainer = assemble(job, set_up(job.settings.runtime))
        trainer.model.train()
        for step in range(4):
            trainer.stepper(trainer.data[step % 2].to(trainer.runtime.device))
        needed = torch.cuda.max_memory_allocated()
        loop.evaluate_split(trainer, job.validation)
        assert torch.cuda.max_memory_reserved() <= 1.5 * 2**30
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert trainer.resolved.token_budget < 65_536
    expected = trainer.demand.peak(trainer.resolved.token_budget)
    assert needed == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("recorded", [True, False])
def test_projected_lstms_train_as_in_plain_pytorch(tmp_path, recorded):
    """Ten bf16 steps are compared with an fp32 loop on the CPU."""
    task, sizes = "bidirectional-lm", {"hidden_size": 128, "projection_size": 64}
    start = save_start(tmp_path / "start", task, **sizes)
    job = job_for(tmp_path, task, start, batching="grouped", token_budget=4096)
    want = plain_training(job)
    found = on_gpu(job, {"precision": "bf16"}, cuda_graphs=recorded, max_steps=10)
    assert found.report.cuda_graphs is recorded
    history = found.history
    assert [p.loss for p in history] == pytest.approx(want.losses, rel=1e-2)
    assert [p.grad_norm for p in history] == pytest.approx(want.norms, rel=5e-2)
    assert found.report.test_loss == pytest.approx(want.test_loss, rel=1e-2)


def test_out_of_memory_halves_the_budget_and_goes_on(tmp_path, caplog):
    shape = {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 1024}
    options = {
        "global_batch_size": 4096,
        "max_steps": 6,
        "log_every": 1,
        "token_budget": 65536,
        "compile": False,
        "cuda_graphs": False,
    }
    want = run(gpu_job(tmp_path / "free", shape=shape, rows=8192, **options))
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    room_gib = 0.6 * want.report.peak_reserved_gib
    torch.cuda.set_per_process_memory_fraction(room_gib / total)
    job = gpu_job(
        tmp_path / "tight", shape=shape, rows=8192, on_oom="shrink", **options
    )
    try:
        with caplog.at_level(logging.WARNING):
            result = run(job)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "out of memory at step 0 with token budget 65536" in caplog.text
    assert result.report.token_budget in (32768, 16384)
    assert result.report.steps == 6
    for point, other in zip(result.history, want.history, strict=True):
        assert point.loss == pytest.approx(other.loss, rel=1e-2)


@pytest.mark.parametrize("lengths", [[700, 33, 900, 1], [640, 640, 33, 200, 0, 0]])
@pytest.mark.parametrize("heads_groups_causal", [(4, 2, True), (2, 2, False)])
def test_attention_of_long_rows_equals_sdpa_row_by_row(lengths, heads_groups_causal):
    """This tests the active flash kernel."""
    heads, groups, causal = heads_groups_causal
    torch.manual_seed(0)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    shape = (sum(lengths), heads + 2 * groups, 64)
    qkv = torch.randn(shape, device="cuda").bfloat16().requires_grad_()
    rule = Rule(64**-0.5, 0.0, causal, -1, 0 if causal else -1)
    got = joined_attention(qkv, heads, bounds, max(lengths), rule)
    plain = qkv.detach().float().requires_grad_()
    parts = plain.split([heads, groups, groups], 1)
    rows = zip(*(part.split(lengths) for part in parts), strict=True)
    want = torch.cat([by_sdpa(*row, causal) for row in rows])
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)
    grad = torch.randn_like(want)
    (one,) = torch.autograd.grad(got, qkv, grad.bfloat16())
    (other,) = torch.autograd.grad(want, plain, grad)
    for mine, its in zip(one.split(lengths), other.split(lengths), strict=True):
        assert (mine.float() - its).norm() <= 1e-2 * its.norm()


def by_sdpa(query, key, value, causal):
    """Map query (T, H, D), key and value (T, G, D) to the result of SDPA (T, H, D)."""
    parts = [part.transpose(0, 1) for part in (query, key, value)]
    out = scaled_dot_product_attention(*parts, is_causal=causal, enable_gqa=True)
    return out.transpose(0, 1)


LONG = 640
"""Row bounds in tokens. Rows are longer than the tiles of flatout's kernels."""


@pytest.mark.parametrize(
    ("family", "task"),
    [("qwen3", "causal-lm"), ("modernbert", "sequence-classification")],
)
def test_a_step_of_long_rows_has_the_plain_models_gradient(tmp_path, family, task):
    """The step is compiled and uses FlashAttention 4 if it is installed. The plain
    model runs row by row in fp32."""
    job = long_job(tmp_path, family, task)
    trainer = assemble(job, set_up(job.settings.runtime))
    assert trainer.resolved.attention == "flatout_rows"
    trainer.model.train()
    plain = plain_model(trainer, task)
    batch = trainer.data[0]
    want = plain_gradients(plain, task, trainer.job.train, batch)
    trainer.stepper.set_scalars(batch)
    trainer.stepper.backward(batch.to(trainer.runtime.device))
    found = {n: p.grad for n, p in trainer.model.model.named_parameters()}
    assert found.keys() == want.keys()
    for name, other in want.items():
        assert (found[name].float() - other).norm() <= 0.1 * other.norm(), name
    ends = [torch.cat([g[n].flatten() for n in want]) for g in (found, want)]
    assert (ends[0] - ends[1]).norm() <= 3e-2 * ends[1].norm()


def long_job(folder, family, task):
    config = {**CONFIGS[family], "hidden_size": 128, "num_attention_heads": 4}
    config |= {"model_type": family, "initializer_range": 0.1}
    if family == "qwen3":
        config |= {"num_key_value_heads": 2, "head_dim": 32}
    else:  # one layer with a window, and two without
        config |= {"num_hidden_layers": 4, "local_attention": 128}
    settings = parse_settings(
        {
            "model": {"task": task, "config": config},
            "tokenize": {"max_length": LONG},
            "train": {
                **{"global_batch_size": 16, "token_budget": 4 * LONG, "epochs": 1},
                **{"compile": True, "cuda_graphs": False, "resume": "never"},
            },
        }
    )
    generator = torch.Generator().manual_seed(3)
    lengths = [LONG, LONG, LONG, 3, 500, LONG, 77, 411] * 2
    rows = [torch.randint(5, 100, (n,), generator=generator).tolist() for n in lengths]
    names = tuple(LABEL_NAMES) if task == "sequence-classification" else ()
    job = make_job(folder)
    return replace(job, settings=settings, label_names=names, train=rows_of(task, rows))


def plain_model(trainer, task):
    """Return transformers' own model in fp32 with the same weights."""
    model = trainer.model.model
    config = deepcopy(model.config)
    plain = auto_class(task).from_config(config, attn_implementation="eager")
    plain.load_state_dict(model.state_dict())
    return plain.to(model.device).train()


def plain_gradients(model, task, rows, batch):
    """Return the gradients of the mean loss over all targets of the batch."""
    total = 0.0
    for row in batch.row_ids.tolist():
        entry = rows.table.slice(row, 1).to_pylist()[0]
        ids = torch.tensor(entry["input_ids"], device=model.device)
        logits = model(input_ids=ids[None]).logits
        if task == "causal-lm":
            logits, labels = logits[0, :-1], ids[1:]
        else:
            labels = torch.tensor([entry["labels"]], device=model.device)
        total = total + cross_entropy(logits, labels, reduction="sum")
    (total / batch.num_targets).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
