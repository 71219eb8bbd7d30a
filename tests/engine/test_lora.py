"""Adapters are trained, saved and loaded as in peft, with packed rows and fused
kernels."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import (
    AutoPeftModelForSequenceClassification,
    LoraConfig,
    PeftModel,
    get_peft_model,
)
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from torch.nn.utils import get_total_norm
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from flatout.datasets import TransformersModel
from flatout.engine.answers.row_steps import replay
from flatout.engine.answers.step_check import verify
from flatout.engine.checkpoints.checkpoint_folder import CheckpointError, step_folders
from flatout.engine.launch.launch import run_job
from flatout.engine.launch.results import load_finished_result, write_result
from flatout.engine.machine.runtime import set_up
from flatout.engine.models.adapters import add_adapter, has_adapter
from flatout.engine.models.building import ModelError, build, load_pretrained
from flatout.engine.models.compilation import compiled
from flatout.engine.models.flops import ModelFlops
from flatout.engine.models.memory import count_parameters, estimate
from flatout.engine.models.model import TaskModel
from flatout.engine.models.model_files import ModelFiles
from flatout.engine.models.model_keys import model_key_faults
from flatout.engine.ops import joined_blocks
from flatout.engine.ops.attention import PACKED
from flatout.engine.parameters import SettingsError, parse_settings
from flatout.engine.sweep.space import check_sweep
from flatout.engine.train.loop import train
from flatout.engine.train.setup import assemble as assembling
from flatout.engine.train.setup.assemble import assemble, unfused_parts
from flatout.engine.train.setup.identity import identity
from tests.engine.families import CONFIGS, built, step_rows, task_model, task_of
from tests.engine.plain import (
    assert_same,
    job_for,
    observed,
    on_two_ranks,
    plain_training,
    save_start,
)
from tests.engine.runs import changed, crashed, curve
from tests.engine.test_compiled_parts import (
    PLAN,
    assert_same as assert_alike,
    by_row,
    packed_gradients,
)

CLASSES = "sequence-classification"
TASKS = {
    CLASSES: AutoModelForSequenceClassification,
    "causal-lm": AutoModelForCausalLM,
}
LORA = {"rank": 4, "alpha": 8}
IDS = torch.tensor([[1, 7, 9, 2], [1, 8, 5, 2]])


def lora_job(folder, task, start, lora=LORA, **train):
    """Return the job of `job_for` with an adapter. Magnitudes have no weight decay,
    like biases."""
    job = job_for(folder, task, start, **{"weight_decay": 0.0, **train})
    return with_lora(job, lora)


def with_lora(job, lora, **model):
    given = job.settings.model_dump(mode="json")
    given["model"] |= {"lora": lora, **model}
    return replace(job, settings=parse_settings(given))


def own_runtime(precision="fp32"):
    own = {"precision": precision, "threads": 1}
    return set_up(parse_settings({"runtime": own}).runtime)


def of_peft(job):
    """Return a model with an adapter of peft, which starts with the same weights."""
    task, lora = job.settings.model.task, job.settings.model.lora
    base = TASKS[task].from_pretrained(job.settings.model.name_or_path)
    names = [
        name
        for name, module in base.base_model.named_modules()
        if isinstance(module, torch.nn.Linear) and re.search(r"\.\d+\.", name)
    ]
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=[f"{base.base_model_prefix}.{name}" for name in names],
        use_dora=lora.use_dora,
        task_type={"causal-lm": "CAUSAL_LM"}.get(task, "SEQ_CLS"),
    )
    model = get_peft_model(base, config)
    ours = assemble(job, own_runtime()).model.model
    start = {n: p for n, p in ours.named_parameters() if p.requires_grad}
    theirs = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert {f"base_model.model.{name}" for name in start} == theirs.keys()
    with torch.no_grad():
        for name, parameter in start.items():
            theirs[f"base_model.model.{name}"].copy_(parameter)
    return model


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("starts")
    return {task: save_start(folder / task, task) for task in TASKS}


@pytest.fixture(scope="module")
def plain(tmp_path_factory, starts):
    """Ten steps of peft in plain PyTorch, by task and kind of adapter."""
    found = {}
    for task, dora in [*((task, False) for task in TASKS), ("causal-lm", True)]:
        folder = tmp_path_factory.mktemp("plain")
        job = lora_job(folder, task, starts[task], LORA | {"use_dora": dora})
        model = of_peft(job)
        found[task, dora] = by_file(plain_training(job, model))
    return found


def by_file(found):
    """Return the trained part of `found`, with flatout's names."""
    prefix = "base_model.model."
    found.gradients = [
        {name.removeprefix(prefix): g for name, g in step.items()}
        for step in found.gradients
    ]
    names = found.gradients[0].keys()
    weights = {n.removeprefix(prefix): w for n, w in found.weights.items()}
    found.weights = {name: weights[name] for name in names}
    return found


@pytest.mark.parametrize(
    ("task", "strategy", "dora"),
    [
        (CLASSES, "packed", False),
        (CLASSES, "grouped", False),
        ("causal-lm", "packed", False),
        ("causal-lm", "fixed", False),
        ("causal-lm", "packed", True),
    ],
)
def test_gradients_and_ten_steps_are_those_of_peft(
    tmp_path, starts, plain, task, strategy, dora
):
    lora = LORA | {"use_dora": dora}
    options = {"batching": strategy, "token_budget": 120}
    job = lora_job(tmp_path, task, starts[task], lora, **options)
    found, result = observed(job, own_runtime())
    assert result.report.strategy == strategy
    assert_same(by_file(found), plain[task, dora])


@pytest.mark.process
@pytest.mark.parametrize(
    "strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)]
)
def test_two_ranks_train_an_adapter_as_one(tmp_path, starts, plain, strategy):
    options = {"distributed": {"strategy": strategy}, "token_budget": 60}
    job = lora_job(tmp_path, CLASSES, starts[CLASSES], **options)
    found, _ = on_two_ranks({"two": job}, tmp_path)["two"]
    if strategy == "fsdp":  # each rank has a part of every gradient
        found.gradients = plain[CLASSES, False].gradients
    assert_same(by_file(found), plain[CLASSES, False])


@pytest.fixture(scope="module")
def trained(tmp_path_factory, starts):
    """A classifier with an adapter: its job and result."""
    job = lora_job(tmp_path_factory.mktemp("run"), CLASSES, starts[CLASSES])
    return job, run_job(job)


def adapt(model, task, lora=LORA):
    """Add an adapter to `model` that has an effect from the first step on."""
    given = {"name_or_path": "x", "task": task, "lora": lora}
    add_adapter(model, parse_settings({"model": given}).model, task_of(task))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)


@torch.no_grad()
def logits_of(model):
    return model.eval()(input_ids=IDS).logits


def test_the_saved_folder_is_one_of_peft(trained, starts):
    _, result = trained
    folder, base = result.model_folder, starts[CLASSES]
    assert not (folder / "model.safetensors").exists()
    plain = AutoModelForSequenceClassification.from_pretrained(base)
    unchanged = logits_of(plain)
    expected = logits_of(PeftModel.from_pretrained(plain, folder))
    own = AutoPeftModelForSequenceClassification.from_pretrained(folder)
    for model in (own, result.model, load_pretrained(folder)):
        torch.testing.assert_close(logits_of(model), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(unchanged, expected, atol=1e-2)
    assert has_adapter(result.model)
    assert not has_adapter(load_pretrained(folder))


@pytest.mark.parametrize("restored", [False, True])
def test_the_catalog_saves_the_adapter_and_the_merged_model(
    trained, tmp_path, restored
):
    """A finished training is saved merged without another one."""
    job, result = trained
    job = changed(job, train={"resume": "auto"})
    merging = with_lora(job, LORA | {"merged": True})
    write_result(job, result)
    model = load_finished_result(merging).model if restored else result.model
    entry = TransformersModel(filepath=str(tmp_path / "model"))
    entry.save((model, ModelFiles(model, (), merging.settings)))
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        path.name for path in entry.path.iterdir()
    }
    loaded = entry.load()
    assert loaded.config.name_or_path == str(entry.path)
    assert loaded.config.id2label == result.model.config.id2label
    merged = entry.path / "merged"
    plain = AutoModelForSequenceClassification.from_pretrained(merged)
    expected = logits_of(result.model)
    for model in (loaded, plain):
        torch.testing.assert_close(logits_of(model), expected, rtol=1e-5, atol=1e-5)
    second = merging.settings.model.model_copy(update={"name_or_path": str(merged)})
    (fault,) = model_key_faults(second)
    assert "has an adapter merged into it" in fault


def test_a_training_starts_from_a_saved_adapter(trained):
    """All weights are then trained. The adapter is merged into them."""
    job, result = trained
    settings = with_lora(job, {}, name_or_path=str(result.model_folder)).settings.model
    model = build(settings, job.task, job.vocabulary, 24)
    assert model.new_weights == []
    assert all(parameter.requires_grad for parameter in model.parameters())
    torch.testing.assert_close(
        logits_of(model), logits_of(result.model), rtol=1e-5, atol=1e-5
    )
    second = settings.model_copy(update={"lora": job.settings.model.lora})
    (fault,) = model_key_faults(second)
    assert "is an adapter already" in fault
    assert "model.lora.rank=4" in fault


def test_an_adapter_without_its_base_is_refused(trained, tmp_path):
    _, result = trained
    folder = tmp_path / "moved"
    result.model.save_pretrained(folder)
    result.model.config.save_pretrained(folder)
    file = folder / "adapter_config.json"
    gone = {"base_model_name_or_path": str(tmp_path / "no")}
    file.write_text(json.dumps(json.loads(file.read_text()) | gone))
    with pytest.raises(ModelError, match="put the base back there"):
        load_pretrained(folder)


def test_a_killed_training_goes_on_and_checkpoints_are_small(tmp_path, starts):
    often = {"log_every": 1, "checkpoint": {"every_steps": 5}, "resume": "auto"}
    lora = LORA | {"dropout": 0.1}
    start = starts[CLASSES]
    whole = run_job(lora_job(tmp_path / "whole", CLASSES, start, lora, **often))
    job = lora_job(tmp_path / "cut", CLASSES, start, lora, **often)
    crashed(job, "step 7/10")
    stored = load_file(step_folders(job.work_folder)[0] / "model.safetensors")
    assert stored
    assert all("lora_" in name or "classifier.modules" in name for name in stored)
    with pytest.raises(CheckpointError, match=r"model.lora.rank: 4 -> 8"):
        run_job(with_lora(job, lora | {"rank": 8}))
    weights = Path(start, "model.safetensors")
    own = weights.read_bytes()
    weights.write_bytes(own[:-4] + b"\0\0\0\1")
    with pytest.raises(CheckpointError, match=r"base model.safetensors: "):
        run_job(job)
    weights.write_bytes(own)
    assert curve(run_job(job)) == curve(whole)


def test_only_the_adapter_and_the_head_are_trained(trained, starts):
    job, _ = trained
    trainer = assemble(job, own_runtime())
    names = {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert all("lora_" in name or "classifier.modules" in name for name in names)
    groups = trainer.optimizer.param_groups
    assert sum(len(group["params"]) for group in groups) == len(names) == 26
    config = AutoConfig.from_pretrained(starts[CLASSES])
    sizes = [p.numel() for p in trainer.stepper.updater.parameters]
    assert count_parameters(config, job.settings.model) == sum(sizes)
    every = sum(p.numel() for p in trainer.model.model.parameters())
    found = estimate(job.settings, config, 1)
    assert found.states == 4 * every + 12 * sum(sizes)
    base = AutoModelForSequenceClassification.from_config(config).num_parameters()
    assert count_parameters(config, with_lora(job, {}).settings.model) == base


def test_frozen_weights_cost_no_operations(starts):
    """There are 2 operations per weight in the forward pass, and 2 for the input's
    gradient."""
    base = TASKS["causal-lm"].from_pretrained(starts["causal-lm"])
    whole = ModelFlops.of(base)
    adapt(base, "causal-lm", {"rank": 1})
    small = sum(p.numel() for p in base.parameters() if p.requires_grad)
    first = base.base_model.layers[0].self_attn.q_proj
    parts = (first.base_layer, first.lora_A["default"])
    below = sum(2 * part.weight.numel() for part in parts)
    assert ModelFlops.of(base).body == whole.body * 4 / 6 + 6 * small - below


def test_a_new_head_and_a_new_pooler_are_trained(tmp_path):
    """The checkpoint of a language model has neither."""
    start = save_start(tmp_path / "start", "masked-lm")
    job = lora_job(tmp_path, CLASSES, start)
    trainer = assemble(job, own_runtime())
    names = [n for n, p in trainer.model.named_parameters() if p.requires_grad]
    own = {n.partition(".modules_to_save")[0] for n in names if "lora_" not in n}
    assert own == {"model.classifier", "model.bert.pooler.dense"}
    folder = run_job(job).model_folder
    there = AutoModelForSequenceClassification.from_pretrained(start, num_labels=3)
    expected = logits_of(PeftModel.from_pretrained(there, folder))
    torch.testing.assert_close(logits_of(load_pretrained(folder)), expected)


@pytest.mark.parametrize(
    ("lora", "model", "told"),
    [
        ({"rank": 0}, {}, "model.lora.rank: should be greater than or equal to 1"),
        ({"alpha": 8}, {}, "alpha without rank: set rank too"),
        (LORA, {"name_or_path": None}, "lora.rank=4 needs a checkpoint"),
    ],
)
def test_settings_that_cannot_work_are_refused(lora, model, told):
    given = {"name_or_path": "x", "config": {"model_type": "bert"}, **model}
    with pytest.raises(SettingsError, match=told):
        parse_settings({"model": {**given, "lora": lora}})


@pytest.mark.parametrize(
    ("target", "near"),
    [("qery", "did you mean query?"), ("classifier", "matches no linear layer")],
)
def test_targets_without_a_layer_are_refused_before_a_node_runs(starts, target, near):
    start = starts[CLASSES]
    lora = LORA | {"targets": ["value", target]}
    settings = parse_settings({"model": {"name_or_path": str(start), "lora": lora}})
    (fault,) = model_key_faults(settings.model)
    assert fault.startswith(f"model.lora.targets: {target!r}")
    assert near in fault


def test_models_without_attention_have_no_adapter(tmp_path):
    start = save_start(tmp_path / "start", "next-key")
    job = lora_job(tmp_path, "next-key", start)
    (fault,) = model_key_faults(job.settings.model)
    assert "a log_key_lstm model has no blocks of attention to adapt" in fault


def test_a_language_model_without_its_head_has_no_adapter(tmp_path):
    body = AutoModel.from_pretrained(save_start(tmp_path / "whole", "masked-lm"))
    body.save_pretrained(tmp_path / "body")
    job = lora_job(tmp_path, "masked-lm", tmp_path / "body")
    with pytest.raises(SettingsError, match=r"the checkpoint has no cls\.predictions"):
        assemble(job, own_runtime())


@pytest.mark.parametrize(
    ("family", "targets", "left"),
    [
        ("bert", ["query"], ""),
        ("bert", ["layer.1.intermediate.dense"], ""),
        ("bert", ["layer.1.output.dense"], "output blocks in 2 of 2 layers"),
        ("qwen3", ["layers.0.mlp.up_proj"], "joined gate and up in 1 of 2 layers"),
    ],
)
def test_fused_parts_step_aside_and_it_is_told(family, targets, left):
    task = "causal-lm" if family == "qwen3" else CLASSES
    found = task_model(family, task, PACKED)
    adapt(found.model, task, {"rank": 4, "targets": targets})
    plan = replace(PLAN, joined=family == "bert")
    found.fused_layers = found.family.fuse(found.model, plan)
    notes = unfused_parts(found)
    assert len(notes) == bool(left)
    assert not left or notes[0].endswith(left)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_first_step_is_verified(tmp_path, starts, precision):
    """The comparison with plain PyTorch excludes the adapter's dropout."""
    job = lora_job(tmp_path, CLASSES, starts[CLASSES], LORA | {"dropout": 0.5})
    verdict = verify(job, own_runtime(precision))
    assert "parameters have a gradient of zero or none" in " ".join(verdict.notes)
    assert verdict is not None
    assert verdict.faults == []


def test_ranks_are_swept(starts):
    given = {"name_or_path": str(starts["causal-lm"]), "task": "causal-lm"}
    given |= {"lora": LORA}
    for ranks, told in (([4, 8], None), ([0, 4], r"model\.lora\.rank: should be")):
        grid = {"grid": {"model.lora.rank": ranks, "model.lora.use_dora": [True]}}
        settings = parse_settings({"model": given, "sweep": grid})
        with pytest.raises(SettingsError, match=told) if told else nullcontext():
            check_sweep(settings)


def test_frozen_matrices_are_kept_in_the_type_of_their_products(
    tmp_path, starts, monkeypatch
):
    """The training is the same bit for bit."""
    job = lora_job(tmp_path, "causal-lm", starts["causal-lm"], max_steps=3)
    found = train(job, own_runtime("bf16"))
    body = assemble(job, own_runtime("bf16")).model.model.base_model
    layer = body.layers[0].mlp.up_proj
    assert layer.base_layer.weight.dtype == torch.bfloat16
    assert {p.dtype for p in layer.lora_A.parameters()} == {torch.float32}
    monkeypatch.setattr(assembling, "round_frozen", lambda model, dtype: None)
    other = lora_job(tmp_path / "o", "causal-lm", starts["causal-lm"], max_steps=3)
    assert curve(train(other, own_runtime("bf16"))) == curve(found)


@pytest.mark.parametrize(
    ("family", "task"),
    [
        ("bert", "masked-lm"),
        ("roberta", CLASSES),
        ("distilbert", "token-classification"),
        ("modernbert", "regression"),
        ("gpt2", "causal-lm"),
        ("mistral", CLASSES),
    ],
)
def test_packed_rows_and_targets_give_the_gradients_of_the_whole_model(family, task):
    """This includes layers that store transposed matrices (GPT-2)."""
    found = []
    for strategy, implementation in (("packed", PACKED), ("grouped", "sdpa")):
        base = built(family, task, implementation)
        torch.manual_seed(0)
        adapt(base, task)
        model = TaskModel(base, task_of(task), 24, whole=strategy == "grouped").train()
        for micro in step_rows(family, task, strategy)[0].micro_batches:
            model(micro)[0].backward()
        own = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert own.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
        found.append(own)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("targets", [["query"], []])
def test_adapted_query_key_and_value_are_joined_after_their_products(
    targets, monkeypatch
):
    monkeypatch.setattr(joined_blocks, "joined_attention", by_row)
    model = built("bert", CLASSES, PACKED)
    adapt(model, CLASSES, LORA | {"targets": targets})
    model.requires_grad_()
    expected = packed_gradients(model)
    assert joined_blocks.fuse_bert(model) == 2
    assert_alike(packed_gradients(model), expected)


def test_adapted_decoders_are_turned_by_the_kernel():
    model = built("qwen3", "causal-lm")
    adapt(model, "causal-lm")
    assert joined_blocks.fuse_decoder(model) == 2
    assert joined_blocks.fuse_gates(model) == 0


@pytest.mark.slow
def test_adapted_blocks_share_whole_graphs(monkeypatch):
    """The first block has its own graph, because its input needs no gradient."""
    monkeypatch.setitem(CONFIGS, "qwen3", {**CONFIGS["qwen3"], "num_hidden_layers": 3})
    model = task_model("qwen3", "causal-lm", "sdpa")
    adapt(model.model, "causal-lm")
    torch._dynamo.reset()
    counters.clear()
    compiled(model, backend="eager").train()
    for micro in step_rows("qwen3", "causal-lm", "grouped")[0].micro_batches:
        model(micro)[0].backward()
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 3


def test_rows_are_replayed_with_the_adapter_and_its_gradient(tmp_path):
    """After training, the loss and the gradient norm of one row are those of peft."""
    start = save_start(tmp_path / "start", CLASSES)
    job = lora_job(tmp_path, CLASSES, start, max_steps=3, learning_rate=0.05)
    train(job, own_runtime())
    name, ((found_loss, found_norm),) = replay(job, own_runtime(), [5], 10**9)
    folder = job.work_folder / name
    base = TASKS[CLASSES].from_pretrained(start)
    model = PeftModel.from_pretrained(base, folder, is_trainable=True).eval()
    ids = torch.from_numpy(job.train.views(np.array([5]))[0].copy()).long()[None]
    label = torch.tensor(job.train.labels_of(np.array([5])))
    loss = F.cross_entropy(model(input_ids=ids).logits, label)
    loss.backward()
    assert found_loss == pytest.approx(loss.item(), rel=1e-4)
    norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert found_norm == pytest.approx(norm.item(), rel=1e-3)
    assert "base model.safetensors" in identity(job)
    (start / "parts").mkdir()
    (start / "model.safetensors").rename(start / "parts" / "1.safetensors")
    assert "base parts/1.safetensors" in identity(job)
    start.rename(tmp_path / "moved")
    with pytest.raises(ModelError, match=r"cannot be loaded \(there is no such folder"):
        load_pretrained(folder)
