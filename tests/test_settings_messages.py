"""Messages that users see if parameters cannot be used."""

import pytest
import yaml

from flatout.engine.parameters import Settings, SettingsError, parse_settings
from flatout.engine.parameters.common import fields_of
from flatout.engine.parameters.faults import first_line
from flatout.engine.parameters.other_names import HERE, REMOVED
from tests.conftest import PROJECT


def faults(parameters: dict) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        parse_settings(parameters)
    head, *lines = str(caught.value).split("\n")
    one = "1 parameter cannot be used; nothing was run. Correct it"
    more = f"{len(lines)} parameters cannot be used; nothing was run. Correct them"
    assert head == (
        f"{one if len(lines) == 1 else more} in conf/ or on the command line "
        "(--params):"
    )
    return [line.removeprefix("  ") for line in lines]


def test_all_faults_come_in_one_message():
    assert faults(
        {
            "runtime": {"tf32": "perhaps", "threads": 0},
            "split": {"fractions": {"train": 0.8, "validation": 0.3, "test": 0.1}},
            "tokenize": {"max_length": 0},
            "train": {"global_batchsize": 8, "loader": {"num_worker": 2}},
        }
    ) == [
        "runtime.tf32: should be a boolean, unable to interpret input (got 'perhaps')",
        "runtime.threads: should be greater than or equal to 1 or should be 'auto' "
        "(got 0)",
        "split.fractions: train + validation + test must be 1, not 1.2",
        "tokenize.max_length: should be greater than or equal to 2 (got 0)",
        "train.loader.num_worker: unknown parameter; did you mean "
        "train.loader.num_workers?",
        "train.global_batchsize: unknown parameter; did you mean "
        "train.global_batch_size?",
    ]


@pytest.mark.parametrize(
    ("parameters", "fault"),
    [
        (
            {"train": {"global_batch_size": 0}},
            "train.global_batch_size: should be greater than or equal to 1 (got 0)",
        ),
        (
            {"train": {"batching": "sorted"}},
            "train.batching: should be 'fixed', 'random', 'grouped' or 'packed' or "
            "should be 'auto' (got 'sorted')",
        ),
        (
            {"train": {"distributed": {"bucket_mib": "al"}}},
            "train.distributed.bucket_mib: should be an integer, unable to parse "
            "string as an integer or should be 'all' (got 'al')",
        ),
        (
            {"benchmark": {"tune_minutes": "soon"}},
            "benchmark.tune_minutes: should be a number, unable to parse string as a "
            "number or should be 'auto' (got 'soon')",
        ),
        (
            {"train": {"seed": 3}},
            "train.seed: unknown parameter; did you mean runtime.seed or split.seed?",
        ),
        (
            {"train": {"global_batch_size": True}},
            "train.global_batch_size: should be a number, not true or false (got True)",
        ),
        (
            {"train": {"epochs": True}},
            "train.epochs: should be a number, not true or false (got True)",
        ),
        (
            {"train": {"max_steps": False}},
            "train.max_steps: should be a number, not true or false (got False)",
        ),
        (
            {"benchmark": {"num_workers": [0, False]}},
            "benchmark.num_workers: should be a number, not true or false "
            "(got [0, False])",
        ),
        (
            {"model": {"config": {}}},
            "model: give name_or_path (a checkpoint) or config.model_type (from "
            "scratch)",
        ),
        (
            {"model": {"name_or_path": "org/model", "trust_remote_code": True}},
            "model: trust_remote_code runs code from the model's repository: pin it "
            "with revision (a commit hash)",
        ),
        (
            {"train": {"distributed": {"num_machines": 2}}},
            "train.distributed: num_machines over 1 needs rendezvous_endpoint: "
            "host:port",
        ),
    ],
)
def test_a_fault_names_its_path_and_what_to_do(parameters, fault):
    assert faults(parameters) == [fault]


@pytest.mark.parametrize(
    "own",
    [
        {"my_node": {"seed": 3, "epochs": 2}},
        {"my_model": {}, "model_options": {"test_size": 0.2}},
        {"optimizer": {"lr": 3}, "threshold": 0.5},
        {"_train": {"epochs": 3}},  # an anchor of YAML
    ],
)
def test_groups_for_nodes_of_ones_own_are_left_alone(own):
    train = {"epochs": 2}
    assert parse_settings({**own, "train": train}) == parse_settings({"train": train})


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("trian", "train"),
        ("Tokenise", "tokenize"),
        ("benchmrak", "benchmark"),
        ("training", "train"),
        ("split_", "split"),
    ],
)
def test_a_misspelt_group_is_refused(misspelt, meant):
    hint = f"{misspelt}: unknown parameter; did you mean {meant}?"
    assert faults({misspelt: {"seed": 3}}) == [hint]


def test_single_values_beside_the_groups_are_refused_where_a_group_has_them():
    assert faults({"epochs": 3, "learning_rte": 1}) == [
        "epochs: unknown parameter; did you mean train.epochs?",
        "learning_rte: unknown parameter; did you mean train.learning_rate?",
    ]


def misspelt(name: str) -> set[str]:
    """`name` with a letter dropped, doubled or swapped, or with other separators."""
    parts = [(name[:at], name[at], name[at + 1 :]) for at in range(len(name))]
    forms = {before + after for before, _, after in parts}
    forms |= {before + 2 * letter + after for before, letter, after in parts}
    forms |= {b + a[0] + letter + a[1:] for b, letter, a in parts if a}
    return (forms | {name.replace("_", "-"), name.replace("_", "")}) - {name}


def test_every_misspelling_of_a_parameter_leads_to_it():
    """A form that is itself the name of another parameter is no misspelling."""
    paths = paths_of(yaml.safe_load((PROJECT / "conf/base/parameters.yml").read_text()))
    known = {path for path, _ in fields_of(Settings)}
    names = {path.rpartition(".")[2] for path in known}
    asked = {path for path in paths & known if "." in path}
    assert len(asked) > 20
    for path in asked:
        groups, _, name = path.rpartition(".")
        for form in misspelt(name) - names:
            given = {form: 1}
            for group in reversed(groups.split(".")):
                given = {group: given}
            [fault] = [one for one in faults(given) if "unknown" in one]
            assert path in fault.partition("did you mean")[2], fault


@pytest.mark.parametrize(
    ("group", "other", "meant"),
    [
        ("train", "warmup_share", "warmup_fraction"),
        ("train", "warmup", "warmup_fraction"),
        ("train", "log_each", "log_every"),
        ("train", "effective_batch_size", "global_batch_size"),
        ("train", "token_limit", "token_budget"),
        ("train", "gradient_norm", "max_grad_norm"),
        ("train", "total_steps", "max_steps"),
        ("train", "betas", "adam_beta2"),
        ("model", "name", "name_or_path"),
        ("runtime", "prec", "precision"),
        ("runtime", "attn", "attention"),
        ("sweep", "pruning", "pruner"),
    ],
)
def test_a_synonym_leads_to_the_parameter(group, other, meant):
    given = {"config": {"model_type": "bert"}} if group == "model" else {}
    hint = f"{group}.{other}: unknown parameter; did you mean {group}.{meant}?"
    assert faults({group: {**given, other: 1}}) == [hint]


UNRELATED = """banana weather colour volume password username address country price
customer invoice title author publisher station distance height width gravity humidity
verbose debug quiet logger language theme debugger retries endpoint hostname region
wandb_project tensorboard neptune run_name experiment description notes comment spam
num_heads beam_width do_sample repetition_penalty mixup cutmix foo bar"""


def test_most_unrelated_words_get_no_suggestion():
    groups = ("train", "runtime", "split", "tokenize", "benchmark", "sweep")
    found = [
        faults({group: {word: 1}}) for group in groups for word in UNRELATED.split()
    ]
    suggested = sum("did you mean" in fault for [fault] in found)
    assert suggested < 0.15 * len(found)


@pytest.mark.parametrize(
    ("brought", "meant"),
    [
        ("lr", "train.learning_rate"),
        ("batch_size", "train.global_batch_size"),
        ("per_device_train_batch_size", "train.global_batch_size"),
        ("gradient_accumulation_steps", "train.global_batch_size"),
        ("num_train_epochs", "train.epochs"),
        ("warmup_ratio", "train.warmup_fraction"),
        ("lr_scheduler_type", "train.schedule"),
        ("save_steps", "train.checkpoint.every_steps"),
        ("save_interval", "train.checkpoint.every_steps"),
        ("eval_steps", "train.evaluate_every"),
        ("logging_steps", "train.log_every"),
        ("log_steps", "train.log_every"),
        ("clipping", "train.max_grad_norm"),
        ("fp16", "runtime.precision"),
        ("bf16", "runtime.precision"),
        ("use_amp", "runtime.precision"),
        ("device", "train.distributed.num_processes"),
        ("max_seq_length", "tokenize.max_length"),
        ("model_name", "model.name_or_path"),
    ],
)
@pytest.mark.parametrize("group", ["train", "model", None])
def test_names_of_other_programs_lead_to_the_parameter(group, brought, meant):
    path = f"{group}.{brought}" if group else brought
    own = {"model_type": "bert"}
    given = {brought: 8} if group is None else {group: {"config": own, brought: 8}}
    assert f"{path}: unknown parameter; did you mean {meant}?" in faults(given)


@pytest.mark.parametrize("brought", ["layer_decay", "llrd", "layerwise_lr_decay"])
def test_names_of_other_programs_for_what_was_removed(brought):
    [fault] = faults({"train": {brought: 0.9}})
    assert fault.startswith(f"train.{brought}: was removed in this version: use train.")


def test_what_is_meant_exists_and_is_called_otherwise():
    paths = paths_of(Settings().model_dump())
    known = {path.rpartition(".")[2] for path in paths}
    assert set(HERE.values()) <= paths | set(REMOVED)
    assert set(HERE) & known <= {"warmup_steps"}  # of the benchmark


def test_an_earlier_name_is_read_and_the_log_has_the_new_one(caplog):
    given = {"strategy": "grouped", "epochs": 2}
    assert parse_settings({"train": given}).train.batching == "grouped"
    told = "parameter train.strategy is now called train.batching: rename it"
    assert [record.getMessage() for record in caplog.records] == [told]
    assert given == {"strategy": "grouped", "epochs": 2}  # the caller's own


def test_an_earlier_name_beside_the_new_one_is_refused():
    both = {"strategy": "grouped", "batching": "packed"}
    hint = "train.strategy: unknown parameter; did you mean train.batching?"
    assert faults({"train": both}) == [hint]


def test_a_strategy_of_another_group_is_not_renamed():
    given = {"train": {"distributed": {"strategy": "fsdp"}}}
    assert parse_settings(given).train.distributed.strategy == "fsdp"


def paths_of(tree: dict, prefix: str = "") -> set[str]:
    paths = {f"{prefix}{key}": value for key, value in tree.items()}
    groups = [(path, value) for path, value in paths.items() if isinstance(value, dict)]
    return {*paths}.union(*(paths_of(below, f"{path}.") for path, below in groups))


def test_true_and_false_are_taken_where_they_are_meant():
    train = {"compile": True, "cuda_graphs": "auto", "fused_optimizer": False}
    assert parse_settings({"train": train}).train.compile is True
    grid = {"train.compile": [True, False]}
    assert parse_settings({"sweep": {"grid": grid}}).sweep.grid == grid


def test_nothing_given_is_valid():
    assert parse_settings({}) == Settings()


def test_an_error_is_told_by_its_first_line_or_by_its_type():
    assert first_line(ValueError(" no such file\nand more")) == "no such file"
    assert first_line(EOFError()) == "EOFError"
