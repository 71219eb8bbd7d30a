"""`verify` detects planted faults and accepts correct steps."""

import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import nn

from flatout.engine.answers.plain import Plain
from flatout.engine.answers.saved_model import verify_model
from flatout.engine.answers.step_check import verify
from flatout.engine.batches.collation import Collator
from flatout.engine.batches.global_batches import Planner
from flatout.engine.models.building import ModelError
from flatout.engine.models.model import TaskModel
from flatout.engine.ops import row_by_row
from flatout.engine.parameters import SettingsError
from flatout.engine.tasks._shared.cross_entropy import CrossEntropy
from flatout.engine.tasks.causal_lm import CausalLM
from flatout.engine.train import optimizer
from flatout.engine.train.optimizer import Updater
from flatout.engine.train.setup import assemble
from flatout.engine.train.step import Stepper
from tests.engine import test_arrays, test_images
from tests.engine.families import BILM, CONFIGS, RECURRENT
from tests.engine.runs import CPU
from tests.engine.test_embedding import pair_job
from tests.forks import fork_two
from tests.make import task_job
from tests.pipelines.tokens import write_tokens

CLASSES = "sequence-classification"


def job(folder, task=CLASSES, family="bert", *, batching="packed", **train):
    """Return a job with 16 rows per step, several micro-batches, and a dropout of
    0.1."""
    known = CONFIGS | BILM | RECURRENT
    config = {"model_type": family.partition("-")[0], **known[family]}
    train = {"token_budget": 60, **train}
    return task_job(folder, task, config, batching=batching, **train)


def faults_of(made, runtime=CPU):
    verdict = verify(made, runtime)
    assert verdict.is_sound == (not verdict.faults)
    return verdict.faults


# Faults, each of which patches the training code.


def divide_by_micro_batch(patch):
    run = Stepper._forward_backward

    def divided(self, tensors, *, is_last):
        self._loss_divisor.fill_(len(tensors["labels"]))
        return run(self, tensors, is_last=is_last)

    patch.setattr(Stepper, "_forward_backward", divided)


def freeze_a_layer(patch):
    built = assemble.seeded_model

    def frozen(*args, **options):
        model = built(*args, **options)
        model.bert.encoder.layer[0].requires_grad_(False)
        return model

    patch.setattr(assemble, "seeded_model", frozen)


def freeze_nothing(patch):
    patch.setattr(assemble, "freeze", lambda model, patterns: None)


def skip_a_row(patch):
    whole = Planner.plan

    def short(self, lengths):
        ranks = [list(own) for own in whole(self, lengths)]
        ranks[-1][-1] = ranks[-1][-1][:-1]
        return tuple(map(tuple, ranks))

    patch.setattr(Planner, "plan", short)


def shift_labels(patch):
    right = CausalLM.targets

    def shifted(self, rows, row_ids, epoch, *, pools_last):
        found = right(self, rows, row_ids, epoch, pools_last=pools_last)
        return replace(found, labels=[np.roll(own, 1) for own in found.labels])

    patch.setattr(CausalLM, "targets", shifted)


def change_inputs(patch, change):
    right = TaskModel._inputs
    patch.setattr(TaskModel, "_inputs", lambda self, b: change(dict(right(self, b))))


def unmask_padding(patch):
    def unmasked(inputs):
        mask = inputs["attention_mask"]
        return {**inputs, "attention_mask": torch.ones_like(mask)}

    change_inputs(patch, unmasked)


def let_positions_run_on(patch):
    def run_on(inputs):
        places = inputs["position_ids"]
        return {**inputs, "position_ids": torch.arange(places.numel())[None] % 100}

    change_inputs(patch, run_on)


def leave_dropout_on(patch):
    right = assemble.replace_dropout

    def on(model, noise):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
        return right(model, noise)

    patch.setattr(assemble, "replace_dropout", on)


def leave_attention_dropout_on(patch):
    right = row_by_row.row_by_row

    def dropped(q, k, v, bounds, rule, *more):
        return right(q, k, v, bounds, rule._replace(dropout=0.1), *more)

    from flatout.engine.ops import attention

    patch.setattr(attention, "row_by_row", dropped)


def round_the_head(patch):
    right = TaskModel.logits
    patch.setattr(TaskModel, "logits", lambda s, b: right(s, b).bfloat16().float())


def decay_biases(patch):
    patch.setattr(optimizer, "NO_DECAY_DIMENSIONS", 0)


def never_clip(patch):
    patch.setattr(Updater, "_clip_grad_norm_divisor", lambda s, n, _: n * 0 + 1)


def reverse_class_weights(patch):
    right = CrossEntropy._weights_on
    patch.setattr(CrossEntropy, "_weights_on", lambda s, d: right(s, d).flip(0))


def forget_a_micro_batch(patch):
    run = Stepper._forward_backward

    def last_alone(self, tensors, *, is_last):
        found = run(self, tensors, is_last=is_last)
        if not is_last:
            self.updater.optimizer.zero_grad()
        return found

    patch.setattr(Stepper, "_forward_backward", last_alone)


def mix_labels_of_rows(patch):
    right = Collator._joined

    def mixed(self, targets, laid):
        index, labels = right(self, targets, laid)
        return index, np.roll(labels, 1, axis=0)

    patch.setattr(Collator, "_joined", mixed)


DECAY = {"weight_decay": 0.1}
CLIPPED = {"optimizer": "sgd", "max_grad_norm": 1e-3}
FAULTS = [
    (divide_by_micro_batch, {}, "loss"),
    (freeze_a_layer, {}, "16 trainable parameters received no gradient"),
    (freeze_nothing, {"freeze": ["embeddings"]}, "frozen parameters are trained: "),
    (skip_a_row, {}, "targets is 15 and 16"),
    (shift_labels, {"task": "causal-lm", "family": "llama"}, "loss"),
    (unmask_padding, {"batching": "random"}, "gradients"),
    (let_positions_run_on, {}, "gradients"),
    (leave_dropout_on, {}, "gradients"),
    (leave_attention_dropout_on, {}, "gradients"),
    (round_the_head, {}, "gradients"),
    (decay_biases, DECAY, "change of weights"),
    (never_clip, CLIPPED, "change of weights"),
    (reverse_class_weights, {"class_weights": [1, 2, 4]}, "loss"),
    (forget_a_micro_batch, {}, "gradients"),
    (mix_labels_of_rows, {"task": "regression"}, "gradients"),
]


def name_of(value):
    """Return a name that is the same in each test process, without memory addresses."""
    return getattr(value, "__name__", str(value)[:30])


@pytest.mark.parametrize(("plant", "own", "named"), FAULTS, ids=name_of)
def test_planted_faults_are_found(tmp_path, monkeypatch, plant, own, named):
    plant(monkeypatch)
    faults = faults_of(job(tmp_path, **own))
    assert any(named in fault for fault in faults), faults


BF16 = {"runtime": "bf16"}
ENCODED = ("regression", "multi-label-classification", "token-classification")
KINDS = ("distilbert", "roberta", "modernbert")
SOUND = {
    "a packed classifier": {},
    "class weights, smoothing": {"class_weights": [1, 2, 4], "label_smoothing": 0.1},
    "a sum of every loss option": {
        "task": "token-classification",
        "class_weights": [1, 2, 4],
        "focal_gamma": 2.0,
        "batching": "random",
    },
    "masks in bf16": {"task": "masked-lm", **BF16},
    "a decoder that pools its last token": {"family": "qwen3", "freeze": ["layers.0"]},
}
MORE = {
    **{
        f"{batching}, budget {budget}": {"batching": batching, "token_budget": budget}
        for batching in ("fixed", "random", "grouped")
        for budget in (24, 4096)
    },
    **{
        f"{task}, {family}": {"task": task, "family": family}
        for task, family in zip(ENCODED, KINDS, strict=True)
    },
    **{
        f"causal-lm, {f}": {"task": "causal-lm", "family": f} for f in ("gpt2", "qwen2")
    },
    "causal-lm, bf16": {"task": "causal-lm", "family": "mistral", **BF16},
    "grouped, bf16": {"batching": "grouped", **BF16},
    "regression, bf16": {"task": "regression", **BF16},
    "clipped": {"max_grad_norm": 0.05},
    "sgd": {"optimizer": "sgd", "max_grad_norm": 0.1},
    "adafactor": {"optimizer": "adafactor"},
    "recomputed layers": {"gradient_checkpointing": True},
    "unfused": {"fused_optimizer": False, "max_grad_norm": 0.1},
    "DeepLog": {"task": "next-key", "family": "log_key_lstm"},
    "DeepLog, bf16": {"task": "next-key", "family": "log_key_lstm", **BF16},
    "ELMo": {"task": "bidirectional-lm", "family": "bilm"},
    "reranking": {"task": "reranking"},
}


SLOW = [pytest.param(own, marks=pytest.mark.slow) for own in MORE.values()]


@pytest.mark.parametrize("own", [*SOUND.values(), *SLOW], ids=[*SOUND, *MORE])
def test_sound_steps_are_not_suspected(tmp_path, own):
    own = dict(own)
    runtime = replace(CPU, precision=own.pop("runtime", "fp32"))
    verdict = verify(job(tmp_path, **own), runtime)
    assert verdict.is_sound, "\n".join(verdict.lines())


OTHERS = {
    "pairs": partial(pair_job, global_batch_size=16, token_budget=256, negatives=1),
    "pairs by the first token": partial(
        pair_job, global_batch_size=16, model={"pooling": "first", "matryoshka": [8]}
    ),
    "tables": test_arrays.job_of,
    "ViT": test_images.job_of,
    "ResNet": partial(test_images.job_of, config=test_images.RESNET),
}


@pytest.mark.parametrize("made", OTHERS.values(), ids=OTHERS)
def test_steps_of_other_rows_are_not_suspected(tmp_path, made):
    """Some have gradients that are mostly rounding errors, from pairs with equal
    vectors."""
    assert faults_of(made(tmp_path)) == []


def _on_this_rank(runtime, group, made, folder, *plants):
    for plant in plants:
        with pytest.MonkeyPatch.context() as patch:
            if plant and runtime.ranks.rank == 1:
                plant(patch)
            verdict = verify(made, runtime, group)
        if verdict is not None:
            name = plant.__name__ if plant else "sound"
            torch.save(verdict, folder / name)


@pytest.mark.process
def test_two_ranks_are_compared_with_one_process(tmp_path):
    plants = (None, skip_a_row, divide_by_micro_batch)
    fork_two(_on_this_rank, job(tmp_path), tmp_path, *plants)

    def read(name):
        return torch.load(tmp_path / name, weights_only=False)

    assert (
        read("sound").is_sound
        and " x 2: fp32 (residual stream fp32), packed" in read("sound").step
    )
    assert "targets is 15 and 16, plain 16" in read("skip_a_row").faults
    assert not read("divide_by_micro_batch").is_sound


def test_the_verdict_shows_both_sides_and_what_is_tolerated(tmp_path):
    lines = verify(job(tmp_path), CPU).lines()
    assert lines[1].startswith("compared with plain transformers (BertForSequenceC")
    assert lines[-1].startswith("Verdict: sound, equal to plain PyTorch but for")
    assert sum(line.strip().startswith("gradient ") for line in lines) == 5
    own = verify(job(tmp_path, "next-key", "log_key_lstm"), CPU).lines()
    assert "the module itself (LogKeyLstmForCausalLM) in fp32" in own[1]


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (RuntimeError("no kernel"), RuntimeError, "no kernel"),
        (torch.OutOfMemoryError(), SettingsError, "does not fit this device's memory"),
    ],
)
def test_what_cannot_be_compared_is_told(tmp_path, monkeypatch, error, kind, said):
    def fails(*_):
        raise error

    monkeypatch.setattr(Plain, "parts", fails)
    with pytest.raises(SettingsError, match="'nope' matches no module"):
        verify(job(tmp_path, freeze=["nope"]), CPU)
    with pytest.raises(kind, match=said):
        verify(job(tmp_path), CPU)


@pytest.mark.parametrize("task", [CLASSES, "causal-lm", "token-classification"])
def test_predictions_of_a_saved_model(tmp_path, monkeypatch, task):
    made = job(tmp_path, task, "llama" if task == "causal-lm" else "bert")
    folder, settings, rows = tmp_path / "m", made.settings, Dataset(made.test.table)
    assemble.build_model(made).save_pretrained(folder)
    tokenizer = write_tokens(tmp_path / "data") / "06_models/tokenizer"
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    with pytest.raises(ModelError, match=r"no config\.json: name a saved model"):
        verify_model(tmp_path, rows, settings)
    verdict = verify_model(folder, rows, settings)
    assert verdict.is_sound, verdict.lines()
    assert "sound, equal to plain PyTorch" in verdict.lines()[-1]
    round_the_head(monkeypatch)
    unmask_padding(monkeypatch)
    assert verify_model(folder, rows, settings).is_sound == (task != CLASSES)
