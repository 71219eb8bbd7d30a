"""The resolved values of `auto` on devices that need not exist."""

from dataclasses import replace

import numpy as np
import pytest
from transformers import AutoConfig, BertConfig

from flatout.engine.families import family_of_type
from flatout.engine.machine.environment import Ranks
from flatout.engine.machine.runtime import Runtime
from flatout.engine.parameters import SettingsError
from flatout.engine.train.setup.resolved_config import resolve, slow_devices
from flatout.engine.train.setup.step_data import make_collator, make_planner
from tests.engine.runs import CPU, H200, changed, make_job

MEAN_TOKENS = 13.57


@pytest.fixture(autouse=True)
def memory_gib(monkeypatch):
    """The memory of a simulated card."""
    held = [140.0]
    size = property(lambda runtime: int(held[0] * 2**30))
    monkeypatch.setattr(Runtime, "device_memory_bytes", size)
    return held


def graphs(tmp_path, batch, *, width=64, runtime=H200, **train):
    job = make_job(
        tmp_path, global_batch_size=batch, **{"token_budget": 10**7, **train}
    )
    assert job.train.facts.mean_length == pytest.approx(MEAN_TOKENS, abs=0.01)
    config = BertConfig(hidden_size=width, num_attention_heads=width // 64)
    return resolve(job, runtime, config).cuda_graphs


def test_graphs_are_for_batches_that_a_slow_host_cannot_launch_in_time(tmp_path):
    # 1.5 x 14,417 tokens for width 1,024, and 1.5 x 57,668 for width 512.
    assert graphs(tmp_path, 1_594, width=1_024)
    assert not graphs(tmp_path, 1_595, width=1_024)
    assert graphs(tmp_path, 1_595, width=512)


def test_where_the_speed_of_a_card_is_not_known_16384_tokens_are_small(tmp_path):
    unknown = replace(H200, device_name="NVIDIA something new")
    assert graphs(tmp_path, 1_207, runtime=unknown)
    assert not graphs(tmp_path, 1_208, runtime=unknown)


def test_graphs_need_room_for_activations_twice(tmp_path, memory_gib):
    # 2 x 20.6 GiB and 1.0 GiB of weights and states fit into 0.8 of the card.
    for size, fit in ((52.9, True), (52.7, False)):
        memory_gib[0] = size
        assert graphs(tmp_path, 1_594, width=512) is fit


PAIR = replace(H200, ranks=Ranks(world_size=2, local_world_size=2))


def test_graphs_are_not_for_several_micro_batches_shards_or_cpus(tmp_path):
    assert graphs(tmp_path, 16, token_budget=218)
    assert not graphs(tmp_path, 16, token_budget=217)
    assert not graphs(tmp_path, 16, gradient_checkpointing=True)
    assert not graphs(tmp_path, 16, runtime=PAIR, distributed={"strategy": "fsdp"})
    assert not graphs(tmp_path, 16, runtime=CPU)


def test_each_of_several_gpus_has_graphs_of_its_share(tmp_path):
    assert graphs(tmp_path, 2 * 1_594, width=1_024, runtime=PAIR)
    assert not graphs(tmp_path, 2 * 1_595, width=1_024, runtime=PAIR)
    assert graphs(tmp_path, 32, runtime=PAIR, token_budget=218)
    assert not graphs(tmp_path, 32, runtime=PAIR, token_budget=217)


def of_task(job, task, kind):
    job = changed(job, model={"task": task, "config": {"model_type": kind}})
    return replace(job, label_names=())


def test_padded_rows_have_graphs_where_a_model_waits_for_nothing(tmp_path):
    """A step is then one micro-batch, whatever the lengths are."""
    job = make_job(tmp_path, global_batch_size=16, token_budget=4_096)
    job = of_task(job, "causal-lm", "log_key_lstm")
    lstm = AutoConfig.for_model("log_key_lstm", hidden_size=64, vocab_size=60)
    fp32 = replace(H200, precision="fp32")
    resolved = resolve(job, fp32, lstm)
    assert (resolved.strategy, resolved.cuda_graphs) == ("grouped", True)
    assert not resolved.compile
    planner = make_planner(job, fp32, resolved)
    lengths = np.array([24] * 2 + [3] * 60)
    assert len(planner.plan(lengths)[0]) == 1
    assert make_collator(job, fp32, resolved, lstm).layout.every_place
    launched = replace(resolved, cuda_graphs=False)
    assert not make_collator(job, fp32, launched, lstm).layout.every_place


def test_lstms_have_graphs_of_steps_of_any_size(tmp_path):
    """LSTMs launch kernels for each position, however many rows there are."""
    job = make_job(tmp_path, global_batch_size=4_096, token_budget=10**6)
    job = of_task(job, "bidirectional-lm", "bilm")
    sizes = {"hidden_size": 2_048, "projection_size": 512, "num_hidden_layers": 2}
    bilm = family_of_type("bilm").model_classes[0].config_class(vocab_size=60, **sizes)
    assert resolve(job, H200, bilm).cuda_graphs
    assert not graphs(tmp_path, 4_096, width=2_048, token_budget=10**6)


@pytest.mark.parametrize(
    ("options", "at_once"),
    [
        ({"global_batch_size": 16}, True),  # between two graphs
        ({"cuda_graphs": False}, False),
        ({"cuda_graphs": False, "distributed": {"bucket_mib": "all"}}, True),
        ({"distributed": {"bucket_mib": "all", "strategy": "fsdp"}}, False),
    ],
)
def test_gradients_travel_at_once_where_asked_to_and_between_graphs(
    tmp_path, options, at_once
):
    config = BertConfig(hidden_size=512, num_attention_heads=8)
    job = make_job(tmp_path, **options)
    assert resolve(job, PAIR, config).flat_all_reduce is at_once
    assert not resolve(job, H200, config).flat_all_reduce


def test_a_gpu_that_is_slower_than_the_others_is_named():
    assert slow_devices([700.0, 690.0, 650.0, 705.0]) == ()
    (note,) = slow_devices([700.0, 690.0, 400.0, 705.0])
    assert "rank 2 computes 400 TFLOP/s, the median of all ranks is 695" in note


@pytest.mark.parametrize(("batch", "multiple"), [(16, 256), (1_818, 256), (1_819, 512)])
def test_large_totals_are_rounded_up_more(tmp_path, batch, multiple):
    """The rows of a rank are rounded up by at most a quarter of its share."""
    job = make_job(tmp_path, global_batch_size=batch, token_budget=10**7)
    config = BertConfig(hidden_size=64, num_attention_heads=1)
    resolved = resolve(job, H200, config)
    collator = make_collator(job, H200, resolved, config)
    assert collator.layout.pad_multiple == multiple
    filler = -(-multiple // job.settings.tokenize.max_length)
    assert collator.layout.row_multiple == batch + filler
    collator = make_collator(job, PAIR, resolve(job, PAIR, config), config)
    assert collator.layout.pad_multiple == 256
    filler = -(-256 // job.settings.tokenize.max_length)
    assert collator.layout.row_multiple == -(-5 * batch // 8) + filler


def test_varlen_attention_is_refused_for_padded_rows(tmp_path):
    config = BertConfig(hidden_size=64, num_attention_heads=1)
    job = make_job(tmp_path, batching="grouped")
    padded = changed(job, runtime={"attention": "varlen"})
    with pytest.raises(SettingsError, match=r"varlen needs train\.batching: packed"):
        resolve(padded, CPU, config)
