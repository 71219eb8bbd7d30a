"""Names in model.config and model.overrides that transformers would accept silently."""

from dataclasses import replace

import pytest

from flatout.doctor.model import checkpoint
from flatout.engine.models.building import ModelError, build
from flatout.engine.models.model_keys import check_model_keys, model_key_faults
from flatout.engine.parameters import ModelSettings, Settings, SettingsError
from flatout.engine.sweep.space import check_sweep
from flatout.engine.tasks import make_task
from tests.engine.families import CONFIGS, VOCABULARY

HEAD = (
    "1 parameter cannot be used; nothing was run. Correct it in conf/ or on the "
    "command line (--params):\n  "
)
TYPO = (
    "model.config.num_key_valu_heads: models of type qwen3 have no such key; did you "
    "mean model.config.num_key_value_heads?"
)


def refused(settings: ModelSettings) -> str:
    with pytest.raises(SettingsError) as caught:
        check_model_keys(settings)
    return str(caught.value)


def test_a_misspelt_key_is_refused_with_the_nearest():
    config = {"model_type": "qwen3", "num_key_valu_heads": 2}
    settings = ModelSettings(task="causal-lm", config=config)
    assert refused(settings) == HEAD + TYPO
    found = checkpoint(settings, None)
    assert (found.status, found.finding) == ("fail", TYPO)


def test_a_removed_key_is_refused_with_its_replacement():
    settings = ModelSettings(config={"model_type": "residual_mlp", "preset": "large"})
    assert "large 12 and 128" in refused(settings)


def test_all_keys_are_named():
    config = {"model_type": "bert", "hiden_size": 8, "hidden_dropuot_prob": 0.0}
    assert refused(ModelSettings(config=config)).split("\n") == [
        "2 parameters cannot be used; nothing was run. Correct them in conf/ or on the "
        "command line (--params):",
        "  model.config.hidden_dropuot_prob: models of type bert have no such key; did "
        "you mean model.config.hidden_dropout_prob?",
        "  model.config.hiden_size: models of type bert have no such key; did you mean "
        "model.config.hidden_size?",
    ]


def test_decoders_take_transformers_switch_to_look_to_both_sides():
    for kind, faults in (("qwen2", 0), ("gpt2", 0), ("bert", 1), ("log_key_lstm", 1)):
        settings = ModelSettings(config={"model_type": kind, "is_causal": False})
        assert len(model_key_faults(settings)) == faults, kind


def test_a_misspelt_type_is_refused_with_the_nearest():
    assert refused(ModelSettings(config={"model_type": "robreta"})) == HEAD + (
        "model.config.model_type: 'robreta' is unknown to transformers; did you mean "
        "roberta?"
    )


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        ({"num_attention_heads": 0}, "integer modulo by zero"),
        (
            {"hidden_size": -4},
            "Trying to create tensor with negative dimension -4: [100, -4]",
        ),
        (
            {"hidden_size": "abc"},
            "Validation error for field 'hidden_size': TypeError: Field 'hidden_size' "
            "expected int, got str (value: 'abc')",
        ),
    ],
)
def test_sizes_that_no_model_has_are_refused(size, reason):
    settings = ModelSettings(config={"model_type": "bert", **size})
    with pytest.raises(ModelError) as caught:
        build(
            settings,
            make_task(settings, "ab"),
            replace(VOCABULARY, size=100),
            24,
            "eager",
        )
    assert str(caught.value) == (
        "model.config: no model for task sequence-classification can be built from "
        f"{settings.config}: {reason}"
    )


@pytest.mark.parametrize("family", CONFIGS)
def test_what_a_model_has_is_taken(family):
    inherited = {"hidden_size": 16, "intermediate_size": 32}  # from conf/base
    config = {"model_type": family, **inherited, **CONFIGS[family], "num_labels": 3}
    assert model_key_faults(ModelSettings(config=config)) == []
    wrong = {**config, "hidden_sizes": 1}
    assert len(model_key_faults(ModelSettings(config=wrong))) == 1


@pytest.mark.parametrize(
    ("task", "number", "wanted"),
    [("sequence-classification", 7, 3), ("regression", 3, 1)],
)
def test_a_number_of_labels_that_the_rows_do_not_have_is_refused(task, number, wanted):
    right = {"model_type": "bert", **CONFIGS["bert"], "num_labels": wanted}
    for found in (number, wanted):
        settings = ModelSettings(task=task, config={**right, "num_labels": found})
        parts = make_task(settings, "abc"), VOCABULARY, 8, "sdpa"
        if found == wanted:
            assert build(settings, *parts).config.num_labels == wanted
            continue
        with pytest.raises(ModelError, match=f"is {number}, .* needs {wanted} outputs"):
            build(settings, *parts)


def test_what_transformers_5_translates_is_taken():
    config = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": None}
    assert model_key_faults(ModelSettings(task="causal-lm", config=config)) == []


def test_overrides_are_held_against_the_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert", "own_key": 1}')
    right = {"hidden_dropout_prob": 0.0, "own_key": 2}
    held = ModelSettings(name_or_path=str(tmp_path), overrides=right)
    assert model_key_faults(held) == []
    wrong = {"hidden_dropout": 0.0}
    settings = ModelSettings(name_or_path=str(tmp_path), overrides=wrong)
    fault = (
        "model.overrides.hidden_dropout: models of type bert have no such key; did "
        "you mean model.overrides.hidden_dropout_prob?"
    )
    assert refused(settings) == HEAD + fault
    with pytest.raises(ModelError) as caught:  # just downloaded from the Hub
        build(settings, make_task(settings, "a"), VOCABULARY, 8, "sdpa")
    assert str(caught.value) == fault


def test_of_a_checkpoint_that_is_not_here_nothing_is_said():
    absent = ModelSettings(name_or_path="nobody/has-this", overrides={"hiden": 1})
    assert model_key_faults(absent) == []


def test_a_sweep_of_a_key_that_is_none_is_refused():
    settings = Settings(
        model={"config": {"model_type": "bert"}},
        sweep={"grid": {"model.config.hiden_size": [8, 16]}},
    )
    with pytest.raises(SettingsError, match=r"sweep names, .*\n  model\.config\.hiden"):
        check_sweep(settings)


def test_a_checkpoint_of_another_kind_than_the_data_is_told_in_plain_words(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert", "hidden_size": 12}')
    (tmp_path / "model.safetensors").touch()
    name, images = str(tmp_path), "image-classification"
    settings = ModelSettings(name_or_path=name, task=images)
    with pytest.raises(ModelError) as caught:
        build(settings, make_task(settings, ["a", "b"]), None, 1)
    assert str(caught.value) == (
        f"model.name_or_path: {name} cannot be loaded for task {images}: transformers "
        "has no model of its type for this task. Name one made for such data, or set "
        "another model.task (docs/tasks.md)"
    )
