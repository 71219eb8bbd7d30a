"""What only a GPU can show. Skipped without one; the figures live in benchmarks."""

import logging
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pytest
import torch
from safetensors.torch import load_file

from flatout.engine import loop
from flatout.engine.environment import apply
from flatout.engine.jobs.launch import run_job
from flatout.engine.loop import train
from flatout.engine.runtime import set_up
from flatout.engine.settings import parse_settings
from tests.engine.families import CONFIGS, LABEL_NAMES, VOCABULARY, token_rows
from tests.engine.runs import make_job

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 256,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def gpu_job(folder, *, runtime=None, shape=None, rows=240, **options):
    options = {
        "global_batch_size": 16,
        "epochs": 4,
        "log_every": 10,
        "learning_rate": 1e-4,
        "error_analysis_every": None,
        "resume": "never",
        **options,
    }
    settings = parse_settings(
        {
            "runtime": runtime or {},
            "model": {"config": {"model_type": "bert", **SHAPE, **(shape or {})}},
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
        {"strategy": "grouped", "compile": False},
        {"strategy": "fixed", "compile": False, "metrics_every": 1},
    ],
    ids=["graphs", "compiled", "micro-batches", "grouped", "fixed"],
)
def test_the_host_waits_for_the_device_at_log_points_alone(
    tmp_path, monkeypatch, options
):
    refused, settled_at = [], 30  # compiled, captured, memory taken

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
        strategy="fixed",
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


def run_ranks(folder, options):
    """In a process that has not used a GPU."""
    return run_job(gpu_job(folder, log_every=1, **options))


def biases(result):
    """All that a layer's products add at the end, (N,): zero before the first step."""
    tensors = load_file(result.last_model_folder / "model.safetensors")
    found = [tensors[name] for name in sorted(tensors) if name.endswith("dense.bias")]
    return torch.cat(found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_exchange_between_graphs_what_one_computes(tmp_path):
    one = run(gpu_job(tmp_path / "one", cuda_graphs=False, log_every=1))
    alone, moved = one.history, biases(one)
    assert moved.abs().max() > 1e-4  # from zero
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
        likeness = torch.nn.functional.cosine_similarity(biases(found), moved, dim=0)
        assert likeness > 0.5


def test_a_language_model_replays_a_few_graphs(tmp_path, caplog):
    """Its batches differ in their number of targets as well."""
    losses = []
    for graphs in (True, False):
        job = gpu_job(tmp_path / str(graphs), cuda_graphs=graphs, log_every=1)
        config = {"model_type": "qwen3", **CONFIGS["qwen3"], "hidden_size": 64}
        model = {"task": "causal-lm", "config": {**config, "head_dim": 32}}
        settings = job.settings.model_copy(
            update={"model": parse_settings({"model": model}).model}
        )
        rows = {
            n: token_rows("causal-lm", 240) for n in ("train", "validation", "test")
        }
        job = replace(job, settings=settings, label_names=(), **rows)
        with caplog.at_level(logging.DEBUG, logger="flatout.engine.step"):
            found = run(job)
        assert found.report.cuda_graphs is graphs
        losses.append(torch.tensor([point.loss for point in found.history]))
    captured = [r for r in caplog.records if "captured a CUDA graph" in r.message]
    assert 1 <= len(captured) <= 6  # of 57 steps: totals of 256 or 512 tokens
    torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-2)


def test_a_second_start_finds_every_graph_of_the_first(tmp_path):
    """Traced again, but neither differentiated nor lowered again."""
    counted = torch._dynamo.utils.counters["aot_autograd"]
    losses = []
    for name in ("first", "second"):
        torch._dynamo.reset()
        counted.clear()
        found = run(gpu_job(tmp_path / name, cuda_graphs=False, log_every=1))
        losses.append(torch.tensor([point.loss for point in found.history]))
    # PyTorch 2.11 lost one of the four; refused is none.
    assert counted["autograd_cache_hit"] >= 3
    assert counted["autograd_cache_bypass"] == 0
    torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("family", "wider"),
    [
        ("qwen3", {"hidden_size": 64, "head_dim": 32}),
        ("modernbert", {"hidden_size": 64}),
        ("gpt2", {"n_embd": 64}),
    ],
)
def test_other_families_train_on_the_fast_path(tmp_path, family, wider):
    job = make_job(tmp_path, rows=64)
    config = {"model_type": family, **CONFIGS[family], **wider}
    options = {"global_batch_size": 16, "epochs": 1, "log_every": 1, "compile": True}
    settings = parse_settings(
        {
            "model": {"config": config},
            "tokenize": {"max_length": 24},
            "train": {**options, "error_analysis_every": None, "resume": "never"},
        }
    )
    result = run(replace(job, settings=settings))
    history, report = result.history, result.report
    assert (report.strategy, report.compile) == ("packed", True)
    assert report.attention == "flatout_rows"
    assert [point.step for point in history] == [1, 2, 3, 4]
    assert all(0.5 < point.loss < 2.0 for point in history)  # ln 3 = 1.1


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
