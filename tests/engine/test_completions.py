"""Only completions are learned: rows, tokens, gradients and training runs."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flatout.engine.batches.global_batches import GlobalBatches
from flatout.engine.ops.attention import PACKED
from flatout.engine.parameters import (
    ModelSettings,
    SettingsError,
    SplitSettings,
    TokenizeSettings,
)
from flatout.engine.rows.tokens import TokenRows
from flatout.engine.tasks import columns_of
from flatout.engine.tokenizing.encoders.encoded import TokensError
from flatout.engine.tokenizing.token_recipes import tokens_recipe
from flatout.engine.tokenizing.tokenizer import TokenizerFile, TokenizerRecipe
from flatout.engine.train.loop import train
from tests.engine.families import (
    CONFIGS,
    DECODERS,
    gradient,
    plain_gradient,
    rows_of,
    step_rows,
    task_model,
    token_rows,
)
from tests.engine.plain import (
    assert_same,
    job_for,
    observed,
    on_two_ranks,
    plain_training,
    save_start,
)
from tests.engine.runs import CPU, metrics_of
from tests.engine.test_pair_rows import frame_of
from tests.make import text_recipes

TASK = "causal-lm"
MODEL = ModelSettings(task=TASK, config={"model_type": "llama", **CONFIGS["llama"]})
LIMITS = TokenizeSettings(vocab_size=400, max_length=24)
PROMPTS = {"prompt_column": "q", "completion_column": "a"}
GOOD = (
    "{% for m in messages %}<|start|>{{ m.role }} : {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}"
    "{{ m.content }}<|end|>{% endif %}{% endfor %}"
)
DROPS_STOP = GOOD.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>")
NO_GENERATION = GOOD.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def talks_of(count: int) -> pd.DataFrame:
    rows = [
        [
            {"role": "user", "content": q},
            {"role": "assistant", "content": a},
            {"role": "user", "content": "fox"},
            {"role": "assistant", "content": "dog"},
        ]
        for q, a in frame_of(count).itertuples(index=False)
    ]
    return pd.DataFrame({"talk": [json.dumps(row) for row in rows]})


def split(frame: pd.DataFrame, **options):
    made = text_recipes(frame, TASK, label_column=None, **options)
    return made["train_rows"].to_dataset(), made["rejected_rows"].table().to_pylist()


def saved(folder, rows, template=None) -> TokenizerFile:
    recipe = TokenizerRecipe(rows, MODEL, LIMITS)
    tokenizer = recipe.build()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return TokenizerFile(folder)


@pytest.mark.parametrize("own", [True, False])
def test_a_completion_stands_behind_its_prompt_and_is_learnt_with_its_end(
    tmp_path, own
):
    """`own` selects flatout's tokenizer instead of one that only adds a start token, as
    Llama's does."""
    rows, rejected = split(frame_of(100), **PROMPTS)
    assert not rejected
    file = saved(tmp_path, rows)
    if not own:
        start = ("<|start|>", file.token_id("bos_token"))
        file.backend.post_processor = TemplateProcessing(
            single="<|start|> $A", special_tokens=[start]
        )
        theirs = PreTrainedTokenizerFast(
            tokenizer_object=file.backend, bos_token=start[0], eos_token="<|end|>"
        )
        theirs.save_pretrained(tmp_path)
        file = TokenizerFile(tmp_path)
    recipe = tokens_recipe("train", rows, file, [], MODEL, LIMITS)
    assert ("end_id" in recipe.key.fields) == (not own)
    tokens = recipe.to_dataset()
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ends = 0
    for row, found in zip(rows, tokens, strict=True):
        prompt, completion = (
            theirs(row[name], add_special_tokens=False)["input_ids"]
            for name in ("text", "completion")
        )
        known = [theirs.bos_token_id, *prompt]
        whole = [*known, *completion, theirs.eos_token_id][:24]
        labels = [-100] * len(known) + whole[len(known) :]
        assert found["input_ids"] == whole
        assert found["labels"] == labels[:24]
        ends += labels[-1] == theirs.eos_token_id
    assert ends > 50


def test_rows_without_special_tokens_have_the_key_of_earlier_versions(tmp_path):
    rows, _ = split(frame_of(100), **PROMPTS)
    file = saved(tmp_path, rows)
    file.backend.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    recipe = tokens_recipe("train", rows, file, [], MODEL, LIMITS)
    assert recipe.options.end_id == file.token_id("eos_token")
    assert "end_id" not in recipe.key.fields


def test_bad_rows_go_to_the_quarantine_and_bad_settings_are_refused():
    frame = frame_of(300).astype(object)
    frame.loc[3, "a"], frame.loc[4, "a"], frame.loc[5, "q"] = " ", None, 7
    reasons = {r["row"]: r["reason"] for r in split(frame, **PROMPTS)[1]}
    assert reasons[3] == "a is empty"
    assert reasons[4] == "a is missing"
    assert reasons[5] == "q is a number, not text"
    talks = talks_of(600)
    talks.loc[1, "talk"] = '[{"role": "user", "content": "x"}]'
    talks.loc[2, "talk"] = '[{"role": "assistant", "content": " "}]'
    talks.loc[3, "talk"] = "hello"
    calls = [{"name": "weather"}]
    user, answer = {"role": "user", "content": "x"}, {"content": "y", "name": None}
    other = [user, {**answer, "role": "assistant", "tool_calls": calls}]
    talks["talk"] = talks["talk"].astype(object)
    talks.at[4, "talk"] = other
    rows, rejected = split(talks, messages_column="talk")
    assert [r["reason"] for r in rejected] == [
        "talk has no message with the role assistant (ShareGPT: from gpt)",
        "talk has an empty message of the assistant",
        "talk is not a list of messages with a role and a content",
    ]
    assert json.loads(rows["messages"][0])[1]["role"] == "assistant"
    kept = rows["messages"][list(rows["source_row"]).index(4)]
    whole = {"role": "assistant", "content": "y", "tool_calls": calls}
    assert json.loads(kept)[1] == whole
    with pytest.raises(SettingsError, match=r"completion_column is for .*causal-lm"):
        columns_of(SplitSettings(**PROMPTS), "sequence-classification")
    with pytest.raises(ValueError, match="go together"):
        SplitSettings(prompt_column="q")


def test_messages_are_written_and_masked_by_the_chat_template(tmp_path):
    rows, _ = split(talks_of(60), messages_column="talk")
    file = saved(tmp_path, rows, GOOD)
    tokens = tokens_recipe("train", rows, file, [], MODEL, LIMITS).to_dataset()
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for row, found in zip(rows, tokens, strict=True):
        expected = theirs.apply_chat_template(
            json.loads(row["messages"]),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids, mask = expected["input_ids"], expected["assistant_masks"]
        labels = [t if m else -100 for t, m in zip(ids, mask, strict=True)]
        assert found["input_ids"] == ids[:24]
        assert found["labels"] == labels[:24]
        assert labels[-1] == theirs.eos_token_id


def test_chats_of_sharegpt_are_read_as_messages():
    names = {"role": "from", "content": "value", "user": "human", "assistant": "gpt"}
    talks = talks_of(60)
    renamed = talks["talk"].copy()
    for usual, other in names.items():
        renamed = renamed.str.replace(f'"{usual}"', f'"{other}"')
    wrong = '[{"from": ["gpt"], "value": "x"}, {"from": "gpt", "value": "y"}]'
    rows, rejected = split(
        pd.DataFrame({"talk": [*renamed, wrong]}),
        messages_column="talk",
        max_rejected_fraction=1,
    )
    plain, _ = split(talks, messages_column="talk")
    both = ["text", "messages"]
    assert rows.select_columns(both)[:] == plain.select_columns(both)[:]
    assert "not a list of messages" in rejected[0]["reason"]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            DROPS_STOP,
            "row 0: in the tokenizer's chat template, the text of the assistant",
        ),
        (NO_GENERATION, "does not mark the text of the assistant"),
        (None, "needs a tokenizer with a chat template"),
    ],
)
def test_templates_that_would_train_something_else_are_refused(
    template, said, tmp_path
):
    rows, _ = split(talks_of(60), messages_column="talk")
    file = saved(tmp_path, rows, template)
    with pytest.raises(TokensError, match=said):
        tokens_recipe("train", rows, file, [], MODEL, LIMITS).to_dataset()


def test_completions_are_not_joined_and_must_fit(tmp_path):
    rows, _ = split(frame_of(100), **PROMPTS)
    file = saved(tmp_path, rows)
    joined = LIMITS.model_copy(update={"join_texts": True})
    with pytest.raises(TokensError, match="join_texts is for whole texts"):
        tokens_recipe("train", rows, file, [], MODEL, joined)
    short = LIMITS.model_copy(update={"max_length": 3})
    with pytest.raises(TokensError, match=r"no row has a token .* 3: raise it"):
        tokens_recipe("train", rows, file, [], MODEL, short).to_dataset()


def completions(rows: TokenRows) -> TokenRows:
    """Return the same rows, of which only a part is learned, and nothing in every fifth
    row."""
    views = [view.tolist() for view in rows.views(np.arange(len(rows)))]
    labels = [
        [-100 if n <= len(ids) // 2 or row % 5 == 4 else t for n, t in enumerate(ids)]
        for row, ids in enumerate(views)
    ]
    return rows_of(TASK, views, labels=pa.array(labels, pa.list_(pa.int32())))


@pytest.mark.parametrize("family", sorted(DECODERS))
def test_packed_and_padded_equal_plain_transformers(family):
    rows = completions(token_rows(TASK, 12))
    data = step_rows(family, TASK, "random", rows=rows)
    expected = plain_gradient(family, TASK, data)
    shapes = {"pad_multiple": 64, "row_multiple": 16}
    for strategy, kernel, options in (
        ("random", "sdpa", {}),
        ("packed", PACKED, {}),
        ("packed", PACKED, shapes),
    ):
        batch = step_rows(family, TASK, strategy, rows=rows, **options)[0]
        loss, found = gradient(task_model(family, TASK, kernel), [batch])
        assert loss == pytest.approx(expected[0], rel=1e-5)
        torch.testing.assert_close(found, expected[1], rtol=1e-4, atol=1e-6)


def test_trainings_equal_plain_ones_on_one_rank_and_on_two(tmp_path):
    start = save_start(tmp_path / "start", TASK)
    one, two = (
        job_for(tmp_path / name, TASK, start, batching="packed", token_budget=100)
        for name in ("one", "two")
    )
    own = {n: completions(getattr(one, n)) for n in ("train", "validation", "test")}
    one, two = replace(one, **own), replace(two, **own)
    plain = plain_training(one)
    assert_same(observed(one, CPU)[0], plain)
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    assert_same(on_two_ranks({"two": two}, ranks)["two"][0], plain)


def cut_prompts(rows: TokenRows, learnt: set[int]) -> TokenRows:
    """Return the same rows. All except `learnt` consist of a prompt only."""
    views = [view.tolist() for view in rows.views(np.arange(len(rows)))]
    labels = [ids if n in learnt else [-100] * len(ids) for n, ids in enumerate(views)]
    return rows_of(TASK, views, labels=pa.array(labels, pa.list_(pa.int32())))


def test_rows_without_a_target_are_counted_and_give_no_loss(tmp_path, caplog):
    start = save_start(tmp_path / "start", TASK)
    few = {"global_batch_size": 1, "max_steps": 8, "epochs": 1}
    job = job_for(tmp_path / "job", TASK, start, rows=8, **few)
    job = replace(job, train=cut_prompts(job.train, {2, 5}))
    result = train(job, CPU)
    batches = GlobalBatches(len(job.train), 1, job.settings.runtime.seed)
    learnt = [step for step in range(8) if batches.rows(step)[0] in (2, 5)]
    assert [step - 1 for step in metrics_of(job)["train_loss"]] == learnt
    assert any("no row of the batches up to step" in w for w in result.report.warnings)
    (told,) = [w for w in result.report.warnings if "have no target" in w]
    assert told in caplog.messages
    assert "6 of 8 training rows" in told
    assert "rows 0, 1, 3, 4, 6, ... of train_tokens" in told


def test_rows_that_are_all_prompts_are_refused(tmp_path):
    start = save_start(tmp_path / "start", TASK)
    job = job_for(tmp_path / "job", TASK, start, rows=8)
    job = replace(job, train=cut_prompts(job.train, set()))
    with pytest.raises(SettingsError, match="every prompt fills the whole row"):
        train(job, CPU)
