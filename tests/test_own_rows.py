"""A custom kind of rows in every pipeline, compared with plain PyTorch."""

import importlib
import json
import pickle
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, load_from_disk
from torch.nn.functional import cross_entropy

from flatout.engine.files.content_key import ContentKey
from flatout.engine.files.keyed_folder import write_whole
from flatout.engine.launch.launch import make_job
from flatout.engine.models.building import load_pretrained
from flatout.engine.parameters import SettingsError, parse_settings
from flatout.engine.rows import row_kind
from flatout.engine.rows.rows import SplitRows, TokenRowsError, array_of, open_rows
from flatout.engine.train.setup.assemble import build_model
from tests.conftest import PROJECT, kedro
from tests.engine.test_arrays import Plain
from tests.own_rows import Waveforms
from tests.projects import copied_conf, interrupted, ran, write_environment

pytestmark = pytest.mark.process

STEPS, RATE = 40, 3e-3
MODEL = {"model_type": "residual_mlp", "num_hidden_layers": 2, "hidden_size": 8}
PARAMETERS = {
    "pipelines": ["train", "evaluate"],
    "model": {"task": "sequence-classification", "config": MODEL},
    "train": {
        "rows": "tests.own_rows.Waveforms",
        "max_steps": STEPS,
        "global_batch_size": 16,
        "log_every": 1,
        "learning_rate": RATE,
        "schedule": "constant",
        "warmup_fraction": 0,
        "weight_decay": 0,
        "loader": {"num_workers": 2},
    },
    "benchmark": {"mode": "grid", "min_window_s": 0, "batch_sizes": [16]},
}
COUNTS = {"train": 300, "validation": 60, "test": 60}


def sounds(split: str):
    """Return waveforms (N, 12), volumes (N,) and class numbers (N,)."""
    chance = np.random.default_rng(list(COUNTS).index(split))
    labels = chance.integers(0, 3, COUNTS[split])
    waveforms = chance.integers(-40, 40, (len(labels), 12)) + 30 * labels[:, None] - 30
    volumes = chance.uniform(0.5, 2, len(labels)).astype(np.float32)
    return waveforms.astype(np.int8), volumes, labels


def samples(split: str) -> np.ndarray:
    """Return the samples (N, 12), computed by NumPy alone."""
    waveforms, volumes, _ = sounds(split)
    return waveforms.astype(np.float32) * volumes[:, None]


def table_of(split: str) -> pa.Table:
    waveforms, volumes, labels = sounds(split)
    return pa.table(
        {"waveform": array_of(waveforms), "volume": volumes, "labels": labels}
    )


@pytest.fixture(scope="module")
def conf(tmp_path_factory) -> Path:
    """A copy of conf/test in which a user has set a custom kind of rows."""
    folder = tmp_path_factory.mktemp("own")
    entry = {"type": "huggingface.ArrowDataset", "path": f"{folder}/{{split}}"}
    names = {"type": "json.JSONDataset", "filepath": f"{folder}/names.json"}
    for split in COUNTS:
        Dataset(table_of(split)).save_to_disk(str(folder / split), num_shards=3)
    unlabelled = Dataset(table_of("test").drop_columns("labels"))
    unlabelled.save_to_disk(str(folder / "predict"))
    (folder / "names.json").write_text('["low", "middle", "high"]')
    new = {**entry, "path": f"{folder}/predict"}
    catalog = {"{split}_waveforms": entry, "label_names": names}
    catalog["predict_waveforms"] = new
    write_environment(copied_conf(folder), "own", PARAMETERS, catalog)
    return folder / "conf"


def run(conf: Path, data: Path, *options: str, **params: object) -> str:
    return ran(*arguments(conf, data, *options, **params), PYTHONPATH=str(PROJECT))


def arguments(conf: Path, data: Path, *options: str, **params: object) -> list[str]:
    given = {"data_dir": data, "runtime.threads": 1, **params}
    values = ",".join(f"{name}={value}" for name, value in given.items())
    return ["run", "--env=own", f"--conf-source={conf}", f"--params={values}", *options]


@pytest.fixture(scope="module")
def finished(conf, empty_store) -> Path:
    """The data folder of a whole `kedro run`."""
    data = conf.parent / "data"
    data.mkdir()
    shutil.copy(empty_store, data / "mlflow.db")
    run(conf, data)
    return data


def history(data: Path) -> pd.DataFrame:
    return pd.read_csv(data / "08_reporting/train_history.csv")


def job_of(conf: Path):
    settings = parse_settings(PARAMETERS)
    splits = {n: load_from_disk(str(conf.parent / n)) for n in COUNTS}
    return make_job(settings, splits, None, ["low", "middle", "high"])


def test_it_trains_as_plain_pytorch_does(finished, conf):
    job, values = job_of(conf), samples("train")
    labels = torch.tensor(sounds("train")[2])
    torch.manual_seed(job.settings.runtime.seed)
    start = list(build_model(job).named_parameters())
    double = values.astype(np.float64)
    facts = (torch.tensor(v).float() for v in (double.mean(0), double.std(0)))
    model, inputs, losses = Plain(start, *facts), torch.tensor(values), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0)
    for step in range(STEPS):
        rows = job.batches.rows(step)
        loss = cross_entropy(model(inputs[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    np.testing.assert_allclose(history(finished)["loss"], losses, rtol=1e-3)


def test_it_is_evaluated_and_predicted_by_its_saved_model(finished, conf):
    run(conf, finished, "--pipelines=predict")
    model = load_pretrained(finished / "06_models/model").eval()
    with torch.no_grad():
        scores = model(torch.tensor(samples("test"))).logits.softmax(1)
    found = pd.read_parquet(finished / "07_model_output/predictions.parquet")
    columns = [f"probability_{name}" for name in ("low", "middle", "high")]
    np.testing.assert_allclose(found[columns], scores, atol=1e-5)
    report = json.loads((finished / "08_reporting/evaluation_report.json").read_text())
    right = scores.argmax(1) == torch.tensor(sounds("test")[2])
    assert report["accuracy"] == pytest.approx(right.float().mean().item())


def test_it_goes_on_bit_for_bit(finished, conf, tmp_path):
    kept = shutil.ignore_patterns("08_reporting", "checkpoints", "model", "last_model")
    data = Path(shutil.copytree(finished, tmp_path / "data", ignore=kept))
    points = data / "08_reporting/train_metrics.jsonl"
    trains = lambda: points.is_file() and "grad_norm" in points.read_text()  # noqa: E731
    begun = arguments(conf, data, "--pipelines=train")
    status = interrupted(begun, tmp_path / "log", trains, 15, PYTHONPATH=str(PROJECT))
    assert status == 143, (tmp_path / "log").read_text()
    run(conf, data, "--pipelines=train")
    report = json.loads((data / "08_reporting/train_report.json").read_text())
    assert report["resumed_from_step"] > 0
    exact = ["step", "loss", "learning_rate", "grad_norm"]
    assert history(finished)[exact].equals(history(data)[exact])


@pytest.mark.slow
def test_two_ranks_train_the_same(finished, conf, tmp_path):
    two = {"train.distributed.num_processes": 2}
    run(conf, tmp_path, "--pipelines=train", **two)
    losses = [history(data)["loss"] for data in (finished, tmp_path)]
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.slow
def test_its_steps_are_benchmarked(finished, conf):
    run(conf, finished, "--pipelines=benchmark")
    trials = pd.read_csv(finished / "08_reporting/benchmark_trials.csv")
    assert set(trials["status"]) == {"ok"}


@pytest.mark.parametrize("shards", [1, 4])
def test_rows_in_parts_and_statistics_are_those_of_numpy(tmp_path, shards):
    folder, values = tmp_path / "rows", samples("train")
    Dataset(table_of("train")).save_to_disk(str(folder), num_shards=shards)
    rows = pickle.loads(pickle.dumps(open_rows(folder)))  # noqa: S301
    assert type(rows) is Waveforms
    order = np.random.default_rng(0).permutation(len(rows))
    np.testing.assert_array_equal(np.stack(rows.views(order)), values[order])
    np.testing.assert_allclose(rows.facts.mean, values.mean(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(rows.facts.deviation, values.std(0), rtol=1e-4)
    assert rows.row_bytes == 12 * 4


def test_statistics_are_those_of_the_code_of_the_class(tmp_path, monkeypatch):
    """The rows are in a folder of flatout's, which stores their statistics."""
    code = (PROJECT / "tests/own_rows.py").read_text().replace("wave", "chang")
    module, folder = tmp_path / "changing_rows.py", tmp_path / "rows"
    table = table_of("train").rename_columns({"waveform": "changform"})

    def fill(target: Path) -> dict:
        Dataset(table).save_to_disk(str(target))
        return {"rows": len(table)}

    def mean() -> list[float]:
        importlib.invalidate_caches()
        sys.modules.pop("changing_rows", None)
        kind = importlib.import_module("changing_rows").Waveforms
        return open_rows(folder, kind).facts.mean

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(SplitRows, "known", SplitRows.known.copy())
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    write_whole(folder, ContentKey({}), fill)
    for factor in (1, 1, 3):
        module.write_text(code.replace("rows, None]", f"rows, None] * {factor}"))
        expected = factor * samples("train").mean(0)
        np.testing.assert_allclose(mean(), expected, rtol=1e-4, atol=1e-4)


def test_lists_without_a_fixed_size_are_refused():
    waveforms, volumes, _ = sounds("test")
    table = pa.table({"waveform": waveforms.tolist(), "volume": volumes})
    with pytest.raises(TokenRowsError, match="fixed size"):
        _ = Waveforms(table).facts


@pytest.mark.parametrize(
    ("name", "method", "said"),
    [
        ("inputs", lambda _, s, rows: s[0][rows] * s[1][rows], "ValueError: operands"),
        ("inputs", lambda _, s, rows: s[0], r"\(300, 12\), not .* of shape \(1, 12\)"),
        ("inputs", lambda _, s, rows: [s[0][r][: r + 1] for r in rows], "ValueError"),
        ("inputs", lambda _, s, rows: s[0][rows, : len(rows)], r"shape \(2, 1\)"),
        ("inputs", lambda _, s, rows: s[0][rows].astype(str), r"returns <U4 of shape"),
        ("stored", lambda _, batch: batch.column("sound"), 'KeyError.*"sound"'),
    ],
)
def test_a_class_whose_methods_fail_is_named(monkeypatch, name, method, said):
    monkeypatch.setattr(Waveforms, name, method)
    rows = Waveforms(table_of("train"))
    named = rf"(?s)train.rows: tests.own_rows.Waveforms fails .*{said}.*correct its"
    with pytest.raises(TokenRowsError, match=named):
        rows.views(np.arange(1))
        rows.views(np.arange(2))


def test_samples_of_two_record_batches_have_one_shape(monkeypatch):
    monkeypatch.setattr(Waveforms, "inputs", lambda _, s, rows: s[0][rows, : len(s[0])])
    parts = table_of("train").slice(0, 5), table_of("train").slice(5, 3)
    with pytest.raises(
        TokenRowsError, match=r"Waveforms fails .*numbers of .*\(3, 5\)"
    ):
        _ = Waveforms(pa.concat_tables(parts)).facts


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("array", "there are no rows 'array'; did you mean arrays?"),
        ("sounds", "there are no rows 'sounds'"),
        ("nowhere.Rows", "cannot be imported .No module named 'nowhere'"),
        ("tests.own_rows.values_in", "does not derive from flatout.*ArrayRows"),
        ("flatout.engine.rows.tokens.TokenRows", "does not derive from"),
    ],
)
def test_other_names_are_refused(name, said):
    with pytest.raises(SettingsError, match=f"train.rows: .*{said}"):
        row_kind(name)


def test_a_command_refuses_them_before_any_node_runs(conf, tmp_path):
    begun = arguments(conf, tmp_path, **{"train.rows": "own_rows.Waveform"})
    done = kedro(*begun, PYTHONPATH=str(PROJECT / "tests"))
    assert done.returncode == 2
    assert "train.rows: 'own_rows.Waveform' cannot be imported" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("column", ["inputs", "sound"])
def test_kinds_and_columns_are_unique(column):
    kind = "waveforms" if column == "sound" else "sounds"
    with pytest.raises(TypeError, match=r"is that of (Array|Wave)"):
        type("Other", (Waveforms,), {"kind": kind, "column": column})


def test_the_page_shows_the_rows_as_they_are():
    code = (PROJECT / "tests/own_rows.py").read_text().partition("class ")[2]
    assert f"```python\nclass {code}```" in (PROJECT / "docs/own_task.md").read_text()
