"""Language models trained from scratch generate what they learned, and stop, in
transformers."""

import json
from dataclasses import replace
from types import SimpleNamespace

import datasets
import pytest
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    pipeline,
    trainer_utils,
)

from flatout.engine.launch.launch import run_job
from flatout.engine.models.building import build
from flatout.engine.parameters import ModelSettings, TokenizeSettings, parse_settings
from flatout.engine.rows.tokens import TokenRows
from flatout.engine.rows.vocabulary import Vocabulary
from flatout.engine.tokenizing.token_recipes import tokens_recipe
from flatout.engine.tokenizing.tokenizer import TokenizerRecipe
from tests.engine.families import CONFIGS, VOCABULARY, task_of
from tests.engine.runs import make_job
from tests.make import saved_tokenizer

TASK = "causal-lm"
MODEL = {
    "task": TASK,
    "config": {
        "model_type": "llama",
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
}
LIMITS = TokenizeSettings(vocab_size=300, max_length=64)
QUESTIONS = ["Who is Ada?", "Where is Oslo?", "What is 2 + 2?", "Name a colour."]
ANSWERS = ["A  Countess\nof Lovelace.", "In Norway, Étienne.", "4", "Blue </s> RED"]
FORMS = {
    "texts": {"text": [f"{q} {a}" for q, a in zip(QUESTIONS, ANSWERS, strict=True)]},
    "completions": {"text": QUESTIONS, "completion": ANSWERS},
    "messages": {
        "text": [f"{q}\n{a}" for q, a in zip(QUESTIONS, ANSWERS, strict=True)],
        "messages": [
            json.dumps(
                [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
            )
            for question, answer in zip(QUESTIONS, ANSWERS, strict=True)
        ],
    },
}


def trained(folder, form):
    """Return the folder of a model that has memorised four texts."""
    rows = datasets.Dataset.from_dict(FORMS[form])
    settings = parse_settings({"model": MODEL})
    file = saved_tokenizer(folder / "tokenizer", rows, settings.model, LIMITS)
    made = tokens_recipe("train", rows, file, [], settings.model, LIMITS)
    tokens = TokenRows(made.to_dataset().data.table)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    job = make_job(
        folder,
        global_batch_size=4,
        max_steps=120,
        epochs=120,
        evaluate_every=None,
        learning_rate=1e-2,
        token_budget=512,
    )
    update = {"model": settings.model, "tokenize": LIMITS}
    splits = dict.fromkeys(("train", "validation", "test"), tokens)
    result = run_job(
        replace(
            job,
            settings=job.settings.model_copy(update=update),
            vocabulary=Vocabulary.of(tokenizer),
            label_names=(),
            **splits,
        )
    )
    tokenizer.save_pretrained(result.model_folder)
    return result.model_folder


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("texts", "completions")]


@pytest.mark.parametrize("form", ["messages", *SLOW])
def test_what_was_learnt_is_written_and_ended(tmp_path, form):
    folder = trained(tmp_path, form)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    assert len(set(special.values()) - {None}) == 3
    for config in (AutoConfig, GenerationConfig):
        found = config.from_pretrained(folder)
        assert {name: getattr(found, name) for name in special} == special
    write = pipeline("text-generation", model=str(folder))
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        prompt = question
        if form == "messages":
            prompt = [{"role": "user", "content": question}]
        options = {"max_new_tokens": 60, "do_sample": False}
        (found,) = write(prompt, return_full_text=False, **options)
        assert found["generated_text"].removeprefix(" ") == answer
    (ids,) = write(prompt, return_tensors=True, **options)
    assert ids["generated_token_ids"][-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("known", [1, [1, 2], None])
def test_a_checkpoint_also_stops_at_the_tokenizers_end(tmp_path, known):
    """The checkpoint is like one from a training run with the Trainer."""
    plain = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **CONFIGS["llama"], vocab_size=100)
    )
    plain.config.eos_token_id = plain.generation_config.eos_token_id = known
    plain.save_pretrained(tmp_path)
    settings = ModelSettings(task=TASK, name_or_path=str(tmp_path))
    model = build(settings, task_of(TASK), replace(VOCABULARY, end_token_id=3), 24)
    ends = {"eos_token_id": 3, "bos_token_id": None, "pad_token_id": None}
    trainer_utils.align_special_tokens(plain, SimpleNamespace(**ends))
    for name in ("config", "generation_config"):
        found, expected = (getattr(m, name).eos_token_id for m in (model, plain))
        assert found == expected, name
    same = build(settings, task_of(TASK), replace(VOCABULARY, end_token_id=1), 24)
    if known:
        assert same.generation_config.eos_token_id == known


def test_nothing_is_lost_and_no_end_stands_behind_a_prompt(tmp_path):
    texts = ["Ünïcode  and\ttabs\n", "日本語 🙂 İ", "x" * 5_000, "</s> [SEP] <s>", ""]
    rows = datasets.Dataset.from_dict({"text": texts})
    model = ModelSettings(**MODEL)
    tokenizers = [TokenizerRecipe(rows, model, LIMITS).build() for _ in range(2)]
    first, second = (t.backend_tokenizer.to_str() for t in tokenizers)
    assert first == second
    tokenizers[0].save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in [*texts, "never seen: Ж ∑ \x00"]:
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.eos_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("join", [False, True])
def test_texts_end_in_a_training_unless_they_are_cut(tmp_path, join):
    texts = ["one", "two words", "a longer text " * 20, "x" * 11]
    rows = datasets.Dataset.from_dict({"text": texts})
    model = ModelSettings(**MODEL)
    file = saved_tokenizer(tmp_path / "tokenizer", rows, model, LIMITS)
    limits = LIMITS.model_copy(update={"max_length": 12, "join_texts": join})
    made = tokens_recipe("train", rows, file, [], model, limits).to_dataset()
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    whole = [[*theirs(text)["input_ids"], theirs.eos_token_id] for text in texts]
    if join:
        joined = [i for ids in whole for i in ids]
        assert [i for ids in made["input_ids"] for i in ids] == joined
    else:
        assert made["input_ids"] == [ids[:12] for ids in whole]


def test_a_smaller_vocabulary_than_all_bytes_has_all_bytes():
    rows = datasets.Dataset.from_dict({"text": ["a b c"]})
    limits = TokenizeSettings(vocab_size=100)
    recipe = TokenizerRecipe(rows, ModelSettings(**MODEL), limits)
    assert len(recipe.build()) == 259
