"""Whether compilation and CUDA graphs are worthwhile, computed by hand, and a choice
that is kept."""

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
from transformers import AutoConfig, AutoModel, BertConfig

from flatout.engine.checkpoints.checkpoint_folder import (
    Manifest,
    read_manifest,
    step_folders,
    write_checkpoint,
)
from flatout.engine.families.vision import VisionTransformer
from flatout.engine.launch.launch import run_job
from flatout.engine.machine.runtime import has_triton
from flatout.engine.models.compilation import distinct_parts
from flatout.engine.ops.attention import PACKED
from flatout.engine.parameters import SettingsError
from flatout.engine.train.setup.acceleration import Planned, plan
from flatout.engine.train.setup.assemble import build_model
from flatout.engine.train.setup.compile_choice import Choice, Work, choose_compilation
from flatout.engine.train.setup.resolved_config import resolve
from tests.engine import test_images
from tests.engine.families import CONFIGS
from tests.engine.runs import CPU, H200, crashed, make_job

SMALL = Work(
    steps=1_250,
    step_flops=6 * 12 * 384**2 * 6 * 640,
    layers=6,
    peak_tflops=989.5,
    parts=2,
    shapes=4,
)
"""Six layers of width 384 and 640 tokens per step: 8,000 short texts, 5 epochs at
32."""
BERT_BASE = replace(SMALL, step_flops=6 * 12 * 768**2 * 12 * 24_600, layers=12)
"""BERT-base with a global batch of 256."""


def test_a_short_run_is_not_compiled():
    """Compilation saves 41 us at the peak, times 1 / 0.31 - 1 / 0.44, and 6 x 0.12 ms
    per step."""
    assert choose_compilation(SMALL) == Choice(
        False,
        True,
        "compile off: costs about 27 s, saves about 0.9 s; CUDA graphs on "
        "(1,250 steps)",
    )
    assert choose_compilation(replace(SMALL, steps=60_000)).compile


def least_steps(work: Work) -> int:
    """Return the number of steps from which compilation is worthwhile."""
    return next(
        steps
        for steps in range(1, 10_000)
        if choose_compilation(replace(work, steps=steps), recorded=False).compile
    )


def test_a_long_run_is():
    """256 / 5,553 - 256 / 7,821 s are 13.5 ms per step, so 2,000 steps save 27 s."""
    assert least_steps(BERT_BASE) == pytest.approx(2_000, rel=0.02)


def test_few_steps_are_not_recorded():
    """Each of the four shapes is launched once and captured once."""
    assert not choose_compilation(replace(SMALL, steps=8)).cuda_graphs
    assert choose_compilation(replace(SMALL, steps=9)).cuda_graphs


def test_where_the_host_is_the_bound_compiling_gains_nothing():
    endless = replace(SMALL, steps=10**9)
    found = choose_compilation(endless, recorded=False)
    assert not found.compile and "saves about 0.0 s" in found.reason


def test_what_is_set_stays():
    for compiled in (True, False):
        for recorded in (True, False):
            found = choose_compilation(SMALL, compiled, recorded)
            assert (found.compile, found.cuda_graphs) == (compiled, recorded)
    assert choose_compilation(SMALL, True).reason.startswith("compile on: costs about")


BASE = BertConfig()


def short_and_long(tmp_path, planned, **train):
    options = {"global_batch_size": 1_813, "token_budget": 10**6, **train}
    return resolve(make_job(tmp_path, **options), H200, BASE, planned)


def test_auto_weighs_the_work_planned_and_yes_or_no_wins(tmp_path):
    """1,813 rows of 13.57 tokens are 24,600 tokens."""
    short, long = Planned(1_000, parts=2), Planned(3_000, parts=2)
    assert not short_and_long(tmp_path, short).compile
    assert short_and_long(tmp_path, long).compile
    assert short_and_long(tmp_path, short, compile=True).compile
    assert not short_and_long(tmp_path, long, compile=False).compile
    reason = short_and_long(tmp_path, short).compile_reason
    assert reason.startswith("compile off: costs about 27 s, saves about 14 s")
    endless = short_and_long(tmp_path, None)  # measured steps
    assert (endless.compile, endless.compile_reason) == (True, "")


def test_a_cpu_and_a_card_of_unknown_speed_are_as_before(tmp_path):
    planned = Planned(12, parts=2)
    job = make_job(tmp_path)
    unknown = replace(H200, device_name="NVIDIA something new")
    assert not resolve(job, CPU, BASE, replace(planned, steps=10**9)).compile
    assert resolve(job, unknown, BASE, planned).compile


def test_samples_have_the_time_of_layers_with_as_many_products(tmp_path):
    """The operations per sample of a ViT with two layers are counted by PyTorch."""
    job = test_images.job_of(tmp_path, test_images.VIT)
    model = build_model(job)
    found = plan(job, H200, model)
    assert found.sample_flops == 6 * VisionTransformer.samples.count_products(model)
    large = replace(found, sample_flops=10**12)
    short, long = (replace(large, steps=n) for n in (20, 10**6))
    choices = [resolve(job, H200, model.config, p) for p in (short, long)]
    assert [c.compile for c in choices] == [False, True]
    assert "compile off: costs about" in choices[0].compile_reason
    tokens = plan(make_job(tmp_path / "tokens"), H200, build_model(make_job(tmp_path)))
    assert tokens.sample_flops == 0


def test_a_resumed_run_chooses_as_the_one_it_continues(tmp_path):
    """The choice is the same although fewer steps remain."""
    job = make_job(tmp_path, global_batch_size=16)
    model = build_model(job)
    kept = {"compile": True, "cuda_graphs": False, "reason": "as weighed then"}
    kept["token_budget"] = 3_840
    here = {"device": "NVIDIA H200", "world_size": 1}
    assert plan(job, H200, model).earlier is None
    assert not resolve(job, H200, BASE, plan(job, H200, model)).compile

    manifest = Manifest(4, 12, 1, {}, None, accelerated=kept | here)
    write_checkpoint(job.work_folder, manifest, lambda folder: [])
    planned = plan(job, H200, model)
    assert (planned.steps, planned.parts) == (12, 2)
    assert planned.earlier == Choice(True, False, "as weighed then")
    assert planned.token_budget == 3_840
    resolved = resolve(job, H200, BASE, planned)
    assert (resolved.compile, resolved.cuda_graphs) == (True, False)
    assert resolved.compile_reason == "as weighed then"

    other = replace(H200, device_name="NVIDIA B200")
    anew = make_job(tmp_path, global_batch_size=16, resume="never")
    set_now = make_job(tmp_path, global_batch_size=16, compile=False)
    elsewhere = plan(job, other, model)
    assert (elsewhere.earlier, elsewhere.steps) == (None, 8)
    assert elsewhere.token_budget is None
    assert plan(anew, H200, model).earlier is None
    set_by_hand = resolve(set_now, H200, BASE, planned)
    assert (set_by_hand.compile, set_by_hand.compile_reason) == (False, "")
    manifest_file = step_folders(job.work_folder)[0] / "manifest.json"
    manifest_file.write_text("torn")
    assert plan(job, H200, model).earlier is None


def test_a_checkpoint_holds_what_its_steps_were_sped_up_by(tmp_path):
    job = make_job(tmp_path, checkpoint={"every_steps": 2, "keep": 2})
    crashed(job, "step 6/12  loss")
    kept = read_manifest(step_folders(job.work_folder)[0]).accelerated
    assert (
        kept.items() >= dict(compile=False, cuda_graphs=False, token_budget=120).items()
    )
    assert kept["world_size"] == 1
    assert run_job(job).report.compile_reason == kept["reason"]


@pytest.mark.parametrize(
    ("kind", "layers", "parts"),
    [("bert", 2, 2), ("qwen3", 2, 2), ("vit", 2, 2), ("vit", 12, 4)],
)
def test_blocks_that_are_alike_are_one_part(kind, layers, parts):
    """The graph for one shape grows with the number of layers."""
    sizes = CONFIGS.get(kind, CONFIGS["bert"]) | {"num_hidden_layers": layers}
    config = AutoConfig.for_model(kind, **sizes)
    assert distinct_parts(AutoModel.from_config(config)) == parts


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_without_a_compiler_a_gpu_has_pytorchs_kernels(tmp_path, no_compiler):
    """A note reports this. If compilation is requested, the run is refused."""
    planned = Planned(10**6, parts=2)
    auto = short_and_long(tmp_path, planned)
    assert (auto.compile, auto.attention) == (False, PACKED)
    [note] = [n for n in auto.notes if n.startswith("no C compiler")]
    assert "Install one (apt install gcc)" in note
    for device, told in ((H200, "no C compiler"), (CPU, r"no C\+\+ compiler")):
        with pytest.raises(SettingsError, match=f"train.compile: {told}.* false"):
            resolve(make_job(tmp_path, compile=True), device, BASE, planned)
    assert not resolve(make_job(tmp_path), CPU, BASE, planned).notes


def test_triton_needs_a_compiler(no_compiler, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    sys.modules["triton"].__spec__ = ModuleSpec("triton", None)
    assert not has_triton()
    monkeypatch.setenv("CC", "/opt/bin/gcc-14")
    assert has_triton()
