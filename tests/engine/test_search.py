"""Which trial is run next, tested on simulated machines with known best settings."""

import json
import re
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import pytest
import yaml
from omegaconf import OmegaConf

from flatout.engine.benchmark import (
    rungs as rungs_module,
    runner as bench_module,
    search as search_module,
    tune,
)
from flatout.engine.benchmark.ladder import (
    ALL,
    LadderState,
    Step,
    leave_one_out,
    without,
)
from flatout.engine.benchmark.outcome import summarise
from flatout.engine.benchmark.recommend import tuned_parameters
from flatout.engine.benchmark.rungs import SLOW, rungs
from flatout.engine.benchmark.runner import Bench
from flatout.engine.benchmark.search import MODES, Search
from flatout.engine.benchmark.trials.processes import Answer
from flatout.engine.benchmark.trials.trial_spec import with_changes
from flatout.engine.parameters import SettingsError, parse_settings
from flatout.engine.parameters.common import by_path
from flatout.reports.console import show_trial, trial_line
from tests.conftest import PROJECT
from tests.engine.benches import FormulaBench, job_files, settings

BUDGETS = [48, 64, 128, 256, 512]
GRID = {
    "mode": "grid",
    "batch_sizes": [8],
    "num_workers": [0, 1, 2],
    "strategies": ["fixed", "random", "grouped", "packed"],
    "token_budgets": BUDGETS,
}
FEW = {**GRID, "num_workers": [0], "strategies": ["packed"], "token_budgets": [512]}
MACHINES = {
    "padding costs": {"io_ms": 0.05, "part_ms": 0.1, "grouped": 1.1, "random": 1.6}
    | {"fixed": 2.0},
    "small parts are quick": {"io_ms": 0.01, "part_ms": 0.001, "cache_slope": 0.02}
    | {"grouped": 1.2, "random": 1.5, "fixed": 2.0},
    "packing is slow": {"io_ms": 0.05, "part_ms": 0.2, "packed": 1.5, "grouped": 1.02}
    | {"random": 1.6, "fixed": 2.0},
    "the loader bounds": {"io_ms": 3.0, "part_ms": 0.2, "grouped": 1.1}
    | {"random": 1.6, "fixed": 2.0},
    "a worker takes a core": {"io_ms": 0.05, "part_ms": 0.2, "worker_cost": 0.3}
    | {"grouped": 1.1, "random": 1.6, "fixed": 2.0},
}


def bench(folder: Path, machine=None, kind=FormulaBench, **options) -> FormulaBench:
    found = kind(
        settings(**options),
        job_files(folder),
        folder / "bench",
        machine={"io_ms": 0.05, "part_ms": 0.1, **(machine or {})},
    )
    found.start()
    return found


def searched(folder: Path, machine=None, kind=FormulaBench, **options) -> Search:
    """Return the results of a mode on a machine with one device."""
    found = Search(bench(folder, machine, kind, **options))
    found.bench.processes = 1
    found.bench.watch = show_trial
    MODES[found.bench.options.mode](found)
    return found


@pytest.mark.parametrize("name", MACHINES)
def test_tune_lands_within_5_percent_of_the_grid_in_a_quarter_of_its_time(
    name, tmp_path
):
    grid = searched(tmp_path, MACHINES[name], **GRID).bench
    whole = [t for t in grid.results if t.kind == "end_to_end" and t.ok]
    assert len(whole) == 1 + 3 * 4 * len(BUDGETS)
    best = max(trial.samples_per_s for trial in whole)
    found = bench(tmp_path, MACHINES[name], mode="tune")
    tuned = tune.tune(found)
    assert tuned.chosen.samples_per_s >= 0.95 * best
    assert found.seconds <= grid.seconds / 4
    again = found.run("end_to_end", tuned.changes)
    assert again.samples_per_s == pytest.approx(tuned.chosen.samples_per_s)


def test_tune_takes_longer_where_trials_compile(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_module, "nvidia_gpu_count", lambda: 0)
    found = bench(tmp_path, mode="tune")
    found.begin_s = time.perf_counter() - 60 * 10
    assert found.explored()
    monkeypatch.setattr(bench_module, "nvidia_gpu_count", lambda: 1)
    assert not found.explored()
    assert found.explored(0.5)


def test_tune_tries_gradients_all_at_once_between_several_devices(tmp_path):
    machine = {"all_at_once": 0.8}
    alone, several, sharded = (bench(tmp_path / n, machine, mode="tune") for n in "123")
    alone.processes = 1
    assert "train.distributed.bucket_mib" not in tune.tune(alone).changes
    several.processes = sharded.processes = 2
    tuned = tune.tune(several)
    assert tuned.changes["train.distributed.bucket_mib"] == "all"
    parameters = tuned_parameters(several.settings, tuned.chosen)
    assert parameters["train"]["distributed"] == {"bucket_mib": "all"}
    strategy = {"train.distributed.strategy": "fsdp"}
    sharded.settings = with_changes(sharded.settings, strategy)
    assert "train.distributed.bucket_mib" not in tune.tune(sharded).changes


def test_the_global_batch_is_kept_unless_it_is_free(tmp_path):
    machine = {"part_ms": 2.0}
    search = searched(tmp_path, machine, mode="tune")
    assert search.tuned.chosen.global_batch_size == 8
    grid = FEW | {"batch_sizes": [8, 16]}
    kept = searched(tmp_path / "kept", machine, **grid)
    assert kept.recommended.global_batch_size == 8
    freed = searched(tmp_path / "free", machine, **grid, free_global_batch=True)
    tuned = summarise(freed)["tuned"]
    assert tuned["changes_optimisation"]
    train = tuned["parameters"]["train"]
    assert train["global_batch_size"] == 16
    assert train["learning_rate"] == pytest.approx(
        2**0.5 * freed.bench.settings.train.learning_rate
    )


def test_a_grid_keeps_the_precision_that_is_configured(tmp_path):
    search = searched(tmp_path, **FEW)  # runtime.precision: fp32
    asked = {t.spec.settings.runtime.precision for t in search.bench.results}
    assert asked == {"fp32"}


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_grid_tries_what_is_made_ahead_and_pinned_memory(tmp_path, monkeypatch, gpus):
    """Without workers there is no prefetching, and without a GPU no pinned memory."""
    monkeypatch.setattr(search_module, "nvidia_gpu_count", lambda: gpus)
    asked = {"num_workers": [0, 2], "strategies": ["packed"], "token_budgets": [64]}
    ahead = {"prefetch_factors": "1 4", "pin_memory": "true false"}
    search = searched(tmp_path, **(GRID | asked | ahead))
    tried = [t for t in search.bench.results if t.kind == "end_to_end"][1:]
    found = [(t.num_workers, t.prefetch_factor, t.pin_memory) for t in tried]
    if not gpus:
        assert found == [(0, 1, True), (2, 1, True), (2, 4, True)]
        return
    with_workers = [
        (2, factor, pinned) for factor in (1, 4) for pinned in (True, False)
    ]
    assert found == [(0, 1, True), (0, 1, False), *with_workers]


@pytest.mark.parametrize("memory_tokens", [100, 0])
def test_tune_finds_settings_where_the_configured_ones_run_out_of_memory(
    tmp_path, memory_tokens
):
    search = searched(tmp_path, {"memory_tokens": memory_tokens}, mode="tune")
    if memory_tokens:
        assert search.tuned.configured.status == "oom"
        assert search.tuned.chosen.ok
        assert search.tuned.chosen.token_budget <= memory_tokens
        return
    assert search.tuned is None
    tried = [t for t in search.bench.results if t.kind == "end_to_end"]
    assert [trial.status for trial in tried] == ["oom"]


@pytest.mark.parametrize(("gpus", "further"), [(0, 3), (1, 1)])
def test_tune_out_of_time_confirms_what_it_has(tmp_path, monkeypatch, gpus, further):
    monkeypatch.setattr(tune, "nvidia_gpu_count", lambda: gpus)
    search = searched(tmp_path, mode="tune", tune_minutes=1e-9)
    assert search.tuned.chosen.trial_id == search.tuned.configured.trial_id
    kinds = [trial.kind for trial in search.bench.results]
    assert kinds == ["end_to_end", "compute", *["again"] * further]
    assert search.bench.results[-1].label == "once more"


def test_further_processes_are_of_what_is_recommended_and_no_choice(tmp_path):
    machine = MACHINES["padding costs"] | {"io_ms": 0.5}
    search = searched(tmp_path, machine, mode="tune")
    last = [t for t in search.bench.results if t.kind == "again"]
    base, picks = search.bench.settings, search.picks
    wanted = tuned_parameters(base, search.tuned.chosen)
    assert [tuned_parameters(base, trial) for trial in last] == [wanted] * 3
    assert not any(trial in last for trial in picks.values())


@pytest.mark.parametrize(
    ("share", "gained"), [(0.99, False), (1.0, False), (0.9, True)]
)
def test_a_gain_within_noise_is_none(share, gained, tmp_path, monkeypatch):
    """`share` is the fraction of the recommended rate that the configured settings
    reach."""
    search = searched(tmp_path, mode="tune")
    rate = search.recommended.samples_per_s
    slower = {"samples_per_s": share * rate, "strategy": "fixed"}
    figures = {**search.configured.figures, **slower}
    configured = replace(search.configured, figures=figures)
    monkeypatch.setattr(Search, "configured", configured)
    assert summarise(search)["tuned"]["gained"] == gained


@dataclass
class SlowingBench(FormulaBench):
    """The host is a tenth slower in each trial, which affects the reference as well."""

    def _answer(self, spec, key):
        answer = super()._answer(spec, key)
        speed = 0.9 ** len(self.results)
        rate = speed * answer.figures.get("samples_per_s", 0.0)
        if not rate:
            return answer
        return replace(answer, figures={**answer.figures, "samples_per_s": rate})


def test_a_host_that_slows_hides_no_gain(tmp_path):
    machine = MACHINES["padding costs"] | {"io_ms": 0.5}
    quiet, slowing = (
        searched(tmp_path / kind.__name__, machine, kind, mode="tune")
        for kind in (FormulaBench, SlowingBench)
    )
    expected, found = (s.tuned.rate / s.configured.rate for s in (quiet, slowing))
    assert found == pytest.approx(expected)
    chosen, configured = slowing.recommended, slowing.configured
    assert chosen.trial_id == slowing.tuned.chosen.trial_id
    assert chosen.rate < configured.rate < slowing.tuned.rate
    source = summarise(slowing)["tuned"]["provenance"]
    rate, before = source["samples_per_s"], source["samples_per_s_before"]
    assert rate / before == pytest.approx(expected)
    *_, last = like = [chosen.rate] + [
        trial.rate for trial in slowing.bench.results if trial.kind == "again"
    ]
    assert source["samples_per_s_low"] == last
    assert source["samples_per_s_high"] == chosen.rate
    assert rate == pytest.approx(median(like))


@dataclass
class ColdBench(FormulaBench):
    """Another program slows the first trial down to a ninth of its rate."""

    def _answer(self, spec, key):
        answer = super()._answer(spec, key)
        if self.results:
            return answer
        rate = answer.figures["samples_per_s"] / 9
        return replace(answer, figures={**answer.figures, "samples_per_s": rate})


def test_the_configured_settings_are_not_faster_than_themselves(tmp_path):
    search = searched(tmp_path, kind=ColdBench, **{**FEW, "token_budgets": [8192]})
    first, again = search.configured, search.recommended
    base = search.bench.settings
    assert tuned_parameters(base, first) == tuned_parameters(base, again)
    assert again.rate == pytest.approx(9 * first.rate)
    found = summarise(search)
    source = found["tuned"]["provenance"]
    assert not found["tuned"]["gained"]
    assert source["samples_per_s_before"] == source["samples_per_s"]
    hours = found["time_to_train"]
    assert hours["hours_before"] == hours["hours_after"]


def test_a_grid_goes_upwards_until_memory_runs_out(tmp_path):
    options = {**GRID, "batch_sizes": [16, 8, 32], "num_workers": [0]}
    options |= {"strategies": ["packed"], "token_budgets": [64, 512]}
    search = searched(tmp_path, {"memory_tokens": 256}, **options)
    asked = [
        (t.global_batch_size, t.token_budget, t.status)
        for t in search.bench.results
        if t.kind == "end_to_end" and t.label == ""
    ]
    small = [(size, 64, "ok") for size in (8, 16, 32)]
    assert sorted(asked) == sorted([*small, (8, 512, "oom")])
    sizes = [changes["train.global_batch_size"] for changes in search.skipped]
    assert sizes == [16, 32]
    assert summarise(search)["skipped"] == search.skipped


def test_processes_that_share_the_cores_are_not_bound_by_their_exchange(tmp_path):
    found = bench(tmp_path, mode="tune")
    for ranks in (1, 2):  # the second adds no gain
        found.run("end_to_end", world_size=ranks)
    assert summarise(Search(found))["verdict"]["bound"] == "compute"


def test_the_ladder_starts_at_conf_slow():
    stored = yaml.safe_load((PROJECT / "conf/slow/parameters.yml").read_text())
    base = parse_settings({"model": {"config": {"model_type": "bert"}}})
    by_file = OmegaConf.merge(base.model_dump(mode="json"), stored)
    assert with_changes(base, SLOW) == parse_settings(OmegaConf.to_container(by_file))


def climbed(folder, machine=None, kind=FormulaBench):
    return searched(folder, machine, kind, mode="ladder")


def test_the_terminal_shows_how_a_rung_compares(tmp_path):
    search = climbed(tmp_path)
    said = map(trial_line, search.bench.results)
    packed = next(line for line in said if "packed: no" in line)
    assert re.search(r"samples/s, \d\.\d\dx the reference", packed)


WORKERS_COST = {"fixed": 2.0, "random": 2.5, "grouped": 1.1, "worker_cost": 1.0}


def test_the_ladder_leaves_out_what_loses(tmp_path):
    search = climbed(tmp_path, WORKERS_COST)
    steps = {step.name: step for step in search.ladder}
    assert not steps["loader workers, pinned memory, prefetch, persistent"].kept
    assert steps["sorted within the batch"].individual == pytest.approx(
        steps["sorted within the batch"].cumulative
    )
    top, end = steps["packed: no padding"], search.ladder[-1]
    assert top.kept
    assert top.cumulative == pytest.approx(
        top.samples_per_s / steps["conf/slow"].samples_per_s
    )
    assert end.name == "all that was kept, compared with conf/slow"
    assert end.individual is None
    assert end.cumulative == pytest.approx(top.cumulative)
    assert not steps["pad to the longest of the batch"].kept


LEFT_OUT = f"{ALL}, without "


def left_out(search: Search) -> dict[str, dict]:
    """Return the settings in which each leave-one-out trial differs from its reference,
    by the rung that was left out."""
    trials = [t for t in search.bench.results if t.label.startswith(LEFT_OUT)]
    return {
        trial.label.removeprefix(LEFT_OUT): dict(
            values_of(trial.spec.settings.model_dump(mode="json"))
            - values_of(trial.spec.options["below"])
        )
        for trial in trials
    }


def values_of(tree: dict) -> set[tuple[str, str]]:
    given = {n: v for n, v in tree.items() if n not in ("benchmark", "sweep")}
    return {(path, str(value)) for path, value in by_path(given)}


HISTORY = {"train.history": "dataframe", "train.empty_cache_every": "1"}
RARELY = {"train.synchronize_every_step": "True", "train.metrics_every": "1"}
RARELY |= {"train.log_every": "1"}


def test_each_kept_optimisation_is_left_out_of_all_that_was_kept(tmp_path):
    search = climbed(tmp_path, WORKERS_COST)
    assert left_out(search) == {
        "history in a list, no empty_cache": HISTORY,
        "metrics, logs and synchronisation once a window": RARELY,
        "fused attention (SDPA)": {"runtime.flash_sdp": "False"},
        "fused AdamW": {"train.fused_optimizer": "False"},
        "packed: no padding": {"train.batching": "grouped"},
    }
    steps = {step.name: step for step in search.ladder}
    assert [step.rung for step in search.ladder] == list(range(len(steps)))
    packed, fused = steps["packed: no padding"], steps["fused AdamW"]
    assert packed.individual > 1.05
    assert packed.leave_one_out == pytest.approx(packed.individual)
    assert (fused.leave_one_out, fused.leave_one_out_note) == (pytest.approx(1.0), "")
    grouped = steps["sorted within the batch"]
    assert grouped.leave_one_out is None
    assert grouped.leave_one_out_note == "not applicable: a later rung replaces it"
    dropped = steps["pad to the longest of the batch"]
    assert (dropped.leave_one_out, dropped.leave_one_out_note) == (None, "")


@dataclass
class FullBench(FormulaBench):
    """Grouped batches do not fit next to another trial. Without the fused optimizer,
    all trials run out of memory."""

    def _end_to_end(self, spec):
        if not spec.label.startswith(LEFT_OUT):
            return super()._end_to_end(spec)
        train, paired = spec.settings.train, "below" in spec.options
        if not train.fused_optimizer or (paired and train.batching == "grouped"):
            return {"status": "oom"}
        return super()._end_to_end(spec)


def test_a_trial_without_an_optimisation_may_fail(tmp_path):
    steps = {s.name: s for s in climbed(tmp_path, WORKERS_COST, FullBench).ladder}
    packed, fused = steps["packed: no padding"], steps["fused AdamW"]
    assert packed.leave_one_out == pytest.approx(packed.individual)
    assert packed.leave_one_out_note == "one after the other"
    assert (fused.leave_one_out, fused.status, fused.kept) == (None, "ok", True)
    assert fused.leave_one_out_note == "oom: one after the other"


def test_what_requires_an_optimisation_is_left_out_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(rungs_module, "nvidia_gpu_count", lambda: 1)
    climb, kept = LadderState(), []
    asked = settings(mode="ladder")
    for rung in rungs(asked)[:-1]:  # with the global batch size 256
        kept.append(climb.complete(rung))
        climb.keep(kept[-1], 1.0)
    top, _ = without(kept)
    assert top == climb.changes
    chosen = {rung.name: rung for rung in kept}
    expected = {
        "TF32": ({"runtime.tf32": False}, []),
        "fused AdamW": (
            {"train.fused_optimizer": False, "train.cuda_graphs": False},
            ["CUDA graphs"],
        ),
        "packed: no padding": (
            {"train.batching": "grouped", "train.cuda_graphs": False},
            ["CUDA graphs"],
        ),
        "torch.compile": (
            {"train.compile": False, "runtime.residual": "fp32"},
            ["residual stream in bf16"],
        ),
        "mixed precision (bf16)": (
            {"runtime.precision": "fp32", "runtime.residual": "fp32"}
            | {"train.batching": "grouped", "train.cuda_graphs": False},
            ["packed: no padding", "residual stream in bf16", "CUDA graphs"],
        ),
        "CUDA graphs": ({"train.cuda_graphs": False}, []),
        "sorted within the batch": ({}, []),
    }
    for name, (differs, others) in expected.items():
        changes, names = without(kept, chosen[name])
        assert names == others
        assert {**SLOW, **changes} == {**SLOW, **top, **differs}
    assert (top["train.global_batch_size"], top["train.cuda_graphs"]) == (256, "auto")


@pytest.mark.process
@pytest.mark.slow
def test_a_real_trial_leaves_out_an_optimisation(tmp_path, warm_trials):
    asked = settings(mode="ladder", repeats=2)
    search = Search(Bench(asked, job_files(tmp_path), tmp_path / "bench"))
    search.bench.start()
    row = Step(1, "", 1.0, 1.0, 1.0, None, True, False, "ok", "", "001")
    names = ("fused AdamW", "packed: no padding")
    kept = [(rung, row) for rung in rungs(asked) if rung.name in names]
    measured = partial(search.bench.compare, with_changes(asked, SLOW))
    steps = list(leave_one_out(measured, kept))
    assert left_out(search) == {
        "fused AdamW": {"train.fused_optimizer": "False"},
        "packed: no padding": {"train.batching": "fixed", "runtime.attention": "eager"},
    }
    for trial, step in zip(search.bench.results, steps, strict=True):
        assert (trial.status, trial.global_batch_size) == ("ok", 16)
        pairs = zip(
            trial.figures["window_samples_per_s"],
            trial.figures["below_window_samples_per_s"],
            strict=True,
        )
        lost = median(remaining / all_kept for remaining, all_kept in pairs)
        assert step.leave_one_out == pytest.approx(1 / lost)
        assert step.leave_one_out_spread_pct == trial.times_below_spread_pct
        assert step.leave_one_out_note == ""
    _, packed = search.bench.results
    assert (packed.strategy, packed.attention) == ("fixed", "eager")
    stored = tmp_path / "bench" / packed.key / "below" / "spec.json"
    train = json.loads(stored.read_text())["spec"]["settings"]["train"]
    assert (train["batching"], train["fused_optimizer"]) == ("packed", True)


@dataclass
class NoisyBench(FormulaBench):
    """Two of four trials are a fifth faster, and so are their references."""

    def _rated(self, spec, total_ms):
        speed = (1.0, 1.2, 1.2, 1.0)[len(self.results) % 4]
        return super()._rated(spec, total_ms / speed)


def test_a_quick_minute_is_no_gain_in_the_ladder(tmp_path):
    search = climbed(tmp_path, kind=NoisyBench)
    slow, quick, *_ = [t for t in search.bench.results if t.kind == "end_to_end"]
    assert quick.samples_per_s == pytest.approx(1.2 * slow.samples_per_s)
    history = search.ladder[1]
    assert (history.individual, history.kept) == (pytest.approx(1.0), True)


@dataclass
class CrowdedBench(FormulaBench):
    """Two processes at the same time run out of memory."""

    def _end_to_end(self, spec):
        if "below" in spec.options:
            return {"status": "oom"}
        return super()._end_to_end(spec)


@dataclass
class LonelyBench(FormulaBench):
    """The reference process ends early."""

    def _answer(self, spec, key):
        answer = super()._answer(spec, key)
        if "below" not in spec.options:
            return answer
        return Answer("unpaired", "the reference ended", 1.0, {})


@pytest.mark.parametrize("kind", [CrowdedBench, LonelyBench])
def test_a_rung_stands_alone_where_two_cannot(kind, tmp_path):
    search = climbed(tmp_path, WORKERS_COST, kind=kind)
    slow, history, *_, end = search.ladder
    assert history.individual == pytest.approx(1.0)
    assert history.note == "one after the other"
    labels = ["conf/slow", history.name]
    labels += ["the reference, alone", f"{history.name}, alone"]
    found = [trial.label for trial in search.bench.results]
    assert found[: len(labels)] == labels
    assert (end.status, end.kept) == ("ok", True)
    assert end.cumulative == pytest.approx(end.samples_per_s / slow.samples_per_s)


@dataclass
class PaddingBench(FormulaBench):
    """The model has no attention and cannot be packed."""

    def _rated(self, spec, total_ms):
        figures = super()._rated(spec, total_ms) | {"attention": "none"}
        packed = figures.get("strategy") == "packed"
        return figures | ({"strategy": "grouped"} if packed else {})


@pytest.mark.parametrize("name", ["packed: no padding", "fused attention (SDPA)"])
def test_a_rung_that_became_something_else_is_not_kept(name, tmp_path):
    search = climbed(tmp_path, kind=PaddingBench)
    rung = next(step for step in search.ladder if step.name == name)
    assert (rung.status, rung.kept, rung.individual) == ("not here", False, None)


def test_a_rung_brings_what_was_left_out_and_it_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(rungs_module, "nvidia_gpu_count", lambda: 1)
    climb = LadderState({"train.fused_optimizer": True})
    chosen = {rung.name: rung for rung in rungs(settings(mode="ladder"))}
    packed = climb.complete(chosen["packed: no padding"])
    assert packed.changes == {
        "runtime.precision": "bf16",
        "train.batching": "packed",
        "runtime.attention": "auto",
    }
    climb.keep(chosen["sorted within the batch"], 1.2)
    graphs = climb.complete(chosen["CUDA graphs"])
    assert graphs.changes == {**packed.changes, "train.cuda_graphs": True}
    residual = climb.complete(chosen["residual stream in bf16"])
    assert residual.changes["train.compile"] is True
    climb.keep(packed, 1.5)
    alone = climb.complete(chosen["CUDA graphs"])
    assert alone.changes == {"train.cuda_graphs": True}
    assert climb.gained == pytest.approx(1.8)
    larger = chosen["global batch 256"]
    assert climb.complete(larger).changes == {"train.global_batch_size": 256}
    climb.keep(graphs, 4.0)
    assert climb.complete(larger).changes == larger.changes


def test_the_ladder_ends_where_conf_slow_does_not_run(tmp_path):
    search = climbed(tmp_path, {"memory_tokens": 0})
    [only] = search.ladder
    assert (only.name, only.status, only.kept) == ("conf/slow", "oom", False)


def test_rungs_that_change_the_optimisation_are_marked_and_last(tmp_path):
    """What is left out trains with the configured batch."""
    found = bench(tmp_path, mode="ladder")
    found.settings = with_changes(found.settings, {"train.global_batch_size": 32})
    marked = [rung.changes_optimisation for rung in rungs(found.settings)]
    assert marked == [False] * (len(marked) - 1) + [True]
    search = Search(found)
    MODES["ladder"](search)
    larger, same, end = search.ladder[-3:]
    assert (larger.name, larger.kept) == ("global batch 32", True)
    assert (same.name, same.changes_optimisation) == (
        "all that was kept of the same optimisation, compared with conf/slow",
        False,
    )
    assert same.cumulative == pytest.approx(larger.cumulative / larger.individual)
    assert end.name == "all that was kept, compared with conf/slow"
    assert end.changes_optimisation
    assert end.cumulative == pytest.approx(larger.cumulative)
    trials = [t for t in found.results if t.label.startswith(LEFT_OUT)]
    assert {trial.global_batch_size for trial in trials} == {32}
    assert "global batch 32" not in left_out(search)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_sizes": []}, "benchmark.batch_sizes: "),
        ({"mode": "fast"}, "benchmark.mode: "),
        ({"num_workers": [-1]}, "benchmark.num_workers.0: "),
        ({"strategies": ["sorted"]}, "benchmark.strategies.0: "),
        ({"step_per_trial": 3}, "did you mean benchmark.steps_per_trial?"),
    ],
)
def test_a_benchmark_that_cannot_be_is_refused_by_name(options, message):
    with pytest.raises(SettingsError) as refused:
        settings(**options)
    assert message in str(refused.value)
