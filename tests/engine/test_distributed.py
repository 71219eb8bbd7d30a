"""The same training on any number of ranks."""

import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForSequenceClassification

from flatout.engine.batches.global_batches import GlobalBatches, Planner
from flatout.engine.checkpoints.checkpoint_folder import (
    file_hash,
    read_manifest,
    step_folders,
)
from flatout.engine.launch.launch import run_job
from flatout.engine.machine.environment import Ranks
from flatout.engine.models.compilation import blocks
from flatout.engine.parameters import DistributedSettings, SettingsError
from flatout.engine.train.flat_all_reduce import FlatAllReduce
from flatout.engine.train.keeping.saved_model import _gathered
from flatout.engine.train.loop import train
from flatout.engine.train.process_group import (
    Agreement,
    ProcessGroup,
    _sharded_separately,
    differing,
)
from flatout.engine.train.recording import recorder
from flatout.engine.train.step import Stepper, StepSums
from tests.engine.families import task_model
from tests.engine.plain import (
    assert_same,
    job_for,
    on_two_ranks,
    plain_training,
    save_start,
    without_targets,
)
from tests.engine.runs import NO_DROPOUT, curve, make_job, run_forked, when_logged
from tests.forks import fork_two

STRATEGIES = ["fixed", "random", "grouped", "packed"]


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=60),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(STRATEGIES),
)
def test_every_row_of_a_step_goes_to_one_rank_once(lengths, world_size, strategy):
    planner = Planner(strategy, 128, 64, world_size)
    plan = planner.plan(np.array(lengths))
    assert len(plan) == world_size
    dealt = [row for rank in plan for micro in rank for row in micro]
    assert sorted(dealt) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan}) == 1  # collective operations match


@given(st.lists(st.integers(1, 320), min_size=64, max_size=256))
def test_packed_ranks_get_nearly_the_same_number_of_tokens(lengths):
    rows = np.array(lengths)
    plan = Planner("packed", 4096, 320, 4).plan(rows)
    tokens = [sum(int(rows[m].sum()) for m in rank) for rank in plan]
    longest = int(rows.max())
    assert max(tokens) - min(tokens) <= longest * len(plan[0])


EXCHANGES = {"buckets": 25, "one piece": "all"}
CASES = [("sequence-classification", name) for name in STRATEGIES] + [
    ("causal-lm", "packed"),
    ("causal-lm", "random"),
]


@pytest.fixture(scope="module")
def by_two(tmp_path_factory):
    """Ten steps of plain PyTorch by task, and of two ranks by (task, case)."""
    folder, jobs, plain = tmp_path_factory.mktemp("two"), {}, {}
    starts = {task: save_start(folder / task, task) for task, _ in CASES}
    for task, strategy in CASES:
        for exchange, size in EXCHANGES.items():
            options = {"batching": strategy, "distributed": {"bucket_mib": size}}
            name = f"{task} {strategy} {exchange}"
            job = job_for(
                folder / f"{name} job", task, starts[task], token_budget=60, **options
            )
            jobs[name] = job
            plain.setdefault(task, job)
    for exchange in EXCHANGES:
        job = without_targets(jobs[f"causal-lm packed {exchange}"], step=2)
        plain["no targets"] = jobs[f"no targets packed {exchange}"] = replace(
            job, work_folder=job.work_folder.with_name("empty")
        )
    found = on_two_ranks(jobs, folder)
    return {task: plain_training(job) for task, job in plain.items()}, found


@pytest.mark.process
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(("task", "strategy"), [*CASES, ("no targets", "packed")])
def test_rows_and_gradients_of_a_step_do_not_depend_on_the_ranks(
    by_two, task, strategy, exchange
):
    """The rates, losses, gradients and norms of ten steps are equal, and so are the
    final weights."""
    plain, found = by_two
    curve, result = found[f"{task} {strategy} {exchange}"]
    assert (result.report.world_size, result.report.strategy) == (2, strategy)
    assert_same(curve, plain[task])
    losses = plain[task].losses
    assert result.report.initial_loss == pytest.approx(losses[0], rel=1e-5)


def exchange_once(runtime, group):
    """Exchange gradients of 3 and 100 numbers, whose initial values differ on rank
    1."""
    sizes, rank = (3, 100), runtime.ranks.rank
    parameters = [nn.Parameter(torch.full((n,), n + 7.0 * rank)) for n in sizes]
    exchange = FlatAllReduce(parameters)
    assert [p.unique().item() for p in parameters] == [3, 100]
    for scale in (1, 5):  # nothing is carried over to the next step
        exchange.clear()
        for _ in range(2):  # micro-batches
            sum(scale * (rank + 1) * p.sum() for p in parameters).backward()
        exchange()
        assert [p.grad.unique().item() for p in parameters] == [6 * scale] * 2


@pytest.mark.process
def test_gradients_in_one_piece_are_summed_and_weights_start_as_rank_0s():
    fork_two(exchange_once)


def join_once_more(runtime, group):
    """Join as in a process that has already used Accelerate for one rank."""
    AcceleratorState._shared_state["distributed_type"] = DistributedType.NO
    PartialState._shared_state["distributed_type"] = DistributedType.NO
    with pytest.raises(SettingsError, match="start the training in a new process"):
        ProcessGroup.join(DistributedSettings(), runtime)
    group.accelerator.state.distributed_type = DistributedType.MULTI_CPU


@pytest.mark.process
def test_ranks_that_would_train_apart_are_refused():
    fork_two(join_once_more)


def train_at_own_rate(runtime, group, folder):
    job = make_job(folder, learning_rate=0.1 * (1 + runtime.ranks.rank))
    with pytest.raises(SettingsError, match=r"train\.learning_rate"):
        train(job, runtime, group)


@pytest.mark.process
def test_ranks_with_other_settings_are_refused(tmp_path):
    fork_two(train_at_own_rate, tmp_path)


def read_sums_once(runtime, group):
    """Rank 1 has the slower loader, and rank 0 has the compilations."""
    rank, sums = runtime.ranks.rank, StepSums.zeros(runtime.device)
    trainer = SimpleNamespace(runtime=runtime, stepper=SimpleNamespace(sums=sums))
    sums.loss += 1.0
    figures = recorder._read_sums(trainer, 2 * (1 - rank), (0.5, 2.5)[rank])
    assert figures["first_bad_step"] == StepSums.NEVER
    assert (figures["compiles"], figures["batch_s"], figures["loss"]) == (2, 2.5, 2)


@pytest.mark.process
def test_the_slowest_loader_of_all_ranks_limits_the_rate():
    fork_two(read_sums_once)


OFTEN = {"every_steps": 2, "keep": 9}


def keep_checkpoint(job, kept):
    """Copy the newest checkpoint so far, to resume from it later."""
    shutil.copytree(step_folders(job.work_folder)[0], kept)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A run, its weights, and a checkpoint after half of the steps."""
    folder = tmp_path_factory.mktemp("one")
    job = make_job(folder, config=NO_DROPOUT, log_every=1, checkpoint=OFTEN)
    kept = folder / "kept"
    with when_logged("step 6/12  loss", lambda: keep_checkpoint(job, kept)):
        result = run_job(job)
    return result, load_file(result.last_model_folder / "model.safetensors"), kept


def two_ranks(folder, strategy, ranks=2, **train):
    distributed = {"num_processes": ranks, "strategy": strategy, "bucket_mib": "all"}
    return make_job(
        folder,
        config=NO_DROPOUT,
        log_every=1,
        checkpoint=OFTEN,
        distributed=distributed,
        **train,
    )


def check_equal(result, one_rank, world_size=2) -> None:
    """Check losses, gradient norms, weights and metrics, and that the model can be
    loaded."""
    expected, weights, _ = one_rank
    assert result.report.world_size == world_size
    for point, other in zip(result.history, expected.history, strict=True):
        assert point.loss == pytest.approx(other.loss, rel=1e-5)
        assert point.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
    found = load_file(result.last_model_folder / "model.safetensors")
    torch.testing.assert_close(found, weights, rtol=1e-3, atol=1e-5)
    assert result.report.test_loss == pytest.approx(expected.report.test_loss, 1e-4)
    model = AutoModelForSequenceClassification.from_pretrained(result.model_folder)
    assert model.num_labels == 3


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_go_on_from_a_checkpoint_of_one(tmp_path, one_rank, strategy):
    kept = one_rank[2]
    result = run_forked(two_ranks(tmp_path, strategy, resume=str(kept)))
    assert result.report.resumed_from_step == read_manifest(kept).step in range(2, 7)
    check_equal(result, one_rank)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_two_ranks_with_sharded_weights_train_what_one_does(tmp_path, one_rank):
    """The ranks also resume from their checkpoint bit for bit."""
    job, kept = two_ranks(tmp_path / "whole", "fsdp"), tmp_path / "kept"
    keeper = threading.Thread(target=keep_first_checkpoint, args=(job, kept))
    keeper.start()
    whole = run_forked(job)
    keeper.join()
    assert whole.report.samples == one_rank[0].report.samples
    check_equal(whole, one_rank)
    manifest = read_manifest(kept)
    assert manifest.world_size == 2
    again = run_forked(two_ranks(tmp_path / "again", "fsdp", resume=str(kept)))
    assert again.report.resumed_from_step == manifest.step in range(2, 12)
    assert curve(again) == curve(whole)
    files = [r.last_model_folder / "model.safetensors" for r in (again, whole)]
    assert file_hash(files[0]) == file_hash(files[1])
    check_one_rank_goes_on(tmp_path / "alone", kept, one_rank)


@pytest.mark.process
@pytest.mark.timeout(120)
def test_frozen_parts_of_sharded_weights_stay_as_they_are(tmp_path):
    """Whole blocks are frozen, and parts of a block that is trained."""
    frozen = ["embeddings", "encoder.layer.0", "attention.self.query"]
    options = {"freeze": frozen, "max_steps": 4}
    job = make_job(tmp_path / "one", config=NO_DROPOUT, log_every=1, **options)
    one = run_job(job)
    weights = load_file(one.last_model_folder / "model.safetensors")
    two = run_forked(two_ranks(tmp_path / "two", "fsdp", **options))
    check_equal(two, (one, weights, None))


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_three_ranks_go_on_from_the_shards_of_two(tmp_path, one_rank):
    """The files have the format of version 0.1. Three ranks cannot divide the rows of
    some weights evenly, and some vectors are short."""
    job, kept = two_ranks(tmp_path / "two", "fsdp"), tmp_path / "kept"
    keeper = threading.Thread(target=keep_first_checkpoint, args=(job, kept))
    keeper.start()
    run_forked(job)
    keeper.join()
    in_parts(kept, 2)
    three = two_ranks(tmp_path / "three", "fsdp", ranks=3, resume=str(kept))
    result = run_forked(three)
    assert result.report.resumed_from_step in range(2, 12)
    check_equal(result, one_rank, world_size=3)


def in_parts(folder: Path, ranks: int) -> None:
    """Split the files of a checkpoint into one per rank, as version 0.1 wrote them."""
    manifest = read_manifest(folder)
    for name in ("model.safetensors", "optimizer.safetensors"):
        whole = load_file(folder / name)
        for rank in range(ranks):
            parts = {}
            for key, tensor in whole.items():
                rows = -(-len(tensor) // ranks) if tensor.dim() else 1
                begin = rows * rank
                if tensor.dim() and begin < len(tensor):
                    parts[key] = tensor[begin : begin + rows].clone()
                elif not tensor.dim() and rank == 0:
                    parts[key] = tensor
            file = folder / (name if not rank else name.replace(".", f".{rank:05d}."))
            save_file(parts, file)
            manifest.files[file.name] = [file.stat().st_size, file_hash(file)]
    (folder / "manifest.json").write_text(manifest.text())


@pytest.fixture()
def alone_in_a_group(tmp_path):
    """A process group that contains only this process."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_of_a_sharded_model_nothing_whole_is_kept(alone_in_a_group):
    """This is true for ranks that only help to gather weights for another rank."""
    model = task_model("bert", "sequence-classification", "sdpa")
    for unit in (*blocks(model), model):
        fully_shard(unit)
    kept = _gathered(model.model, is_main=False)
    assert kept and all(t.untyped_storage().nbytes() == 0 for t in kept.values())


@pytest.mark.parametrize("task", ["sequence-classification", "masked-lm"])
def test_blocks_whose_weights_are_tied_to_others_are_not_sharded_separately(task):
    """BERT's word embeddings are also the output layer of its masked language model."""
    model = task_model("bert", task, "sdpa")
    names = {
        type(block).__name__ for block in _sharded_separately(model, blocks(model))
    }
    assert ("BertEmbeddings" in names) == (task == "sequence-classification")
    assert "BertLayer" in names


def check_one_rank_goes_on(folder, kept, one_rank) -> None:
    """Resume from a checkpoint of two ranks, and check the rows and losses of each
    step."""
    expected, rows = one_rank[0], {}
    resume = {"resume": str(kept), "log_every": 1}
    job = make_job(folder, config=NO_DROPOUT, checkpoint=OFTEN, **resume)
    stepped = Stepper.__call__

    def noted(self, batch):
        rows[batch.step] = batch.row_ids.tolist()
        stepped(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "__call__", noted)
        result = run_job(job)
    batches = GlobalBatches(60, 16, job.settings.runtime.seed)
    steps = range(read_manifest(kept).step, 12)
    assert rows == {step: batches.rows(step).tolist() for step in steps}
    losses = [point.loss for point in result.history]
    assert losses == pytest.approx([p.loss for p in expected.history], rel=1e-5)


def keep_first_checkpoint(job, kept):
    while not step_folders(job.work_folder):
        time.sleep(0.01)
    keep_checkpoint(job, kept)


def test_alone_a_rank_agrees_with_itself_at_every_step():
    agreement = Agreement(Ranks(), None, every_steps=5)
    assert all(agreement.is_due(done) for done in range(1, 8))
    assert agreement.reach(3, 15, True) == (15, True)


def test_differences_are_named_with_both_values():
    assert differing({"a": 1, "b": 2}, {"a": 1, "b": 3}) == ["b: 2 -> 3"]


def test_a_setting_added_later_with_the_default_none_is_no_difference():
    assert differing({"a": 1}, {"a": 1, "new": None}) == []
