"""Numbers of a fixed shape: read, checked, dealt, and trained as plain PyTorch does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from flatout.engine.arrays.array_files import ArrayFiles
from flatout.engine.arrays.recipes import array_recipes
from flatout.engine.arrays.sources import ArraysError
from flatout.engine.batches.global_batches import GlobalBatches
from flatout.engine.launch.launch import run_job
from flatout.engine.machine.runtime import set_up
from flatout.engine.models.building import load_pretrained
from flatout.engine.parameters import parse_settings
from flatout.engine.rows.arrays import ArrayRows
from flatout.engine.train.setup.assemble import build_model
from flatout.engine.train.setup.job import TrainJob
from tests.engine.runs import Crash, crash, curve, when_logged

MODEL = {
    "model_type": "residual_mlp",
    "num_hidden_layers": 2,
    "hidden_size": 8,
}


def settings_of(**train):
    task = train.pop("task", "sequence-classification")
    return parse_settings(
        {
            "runtime": {"precision": "fp32", "threads": 1, "seed": 3},
            "model": {"task": task, "config": MODEL},
            "split": {"max_rejected_fraction": 1},
            "train": {
                "rows": "arrays",
                "global_batch_size": 16,
                "epochs": 3,
                "log_every": 1,
                "learning_rate": 1e-2,
                "error_analysis_every": None,
                "distributed": {"num_processes": 1},
                **train,
            },
        }
    )


def samples(count: int, classes: int = 3):
    generator = np.random.default_rng(5)
    labels = generator.integers(0, classes, count)
    values = generator.normal(size=(count, 2, 3)) * 4 + labels[:, None, None]
    return values.astype(np.float32), labels


def split(path, settings, inputs=()):
    source = ArrayFiles(path, tuple(inputs), settings.split.label_column)
    return array_recipes("arrays", source, settings.split, settings.model)


def job_of(folder, count=200, **train) -> TrainJob:
    settings = settings_of(**train)
    values, labels = samples(count)
    folder.mkdir(exist_ok=True, parents=True)
    np.savez(folder / "a.npz", inputs=values, label=labels)
    made = split(folder / "a.npz", settings)
    rows = [
        ArrayRows.from_dataset(made[name].to_dataset())
        for name in ("train", "validation", "test")
    ]
    return TrainJob(
        settings,
        *rows,
        None,
        tuple(made["label_names"]),
        folder / "run",
        folder / "metrics.jsonl",
        "k",
    )


def rejected(made) -> list[tuple[str, int, str]]:
    rows = made["rejected"].table().to_pylist()
    return [(row["source"], row["row"], row["reason"]) for row in rows]


def test_columns_of_parquet_and_what_cannot_be_used(tmp_path):
    values, labels = samples(60)
    a = values[:, 0, 0].astype(object)
    a[3], a[7], a[9] = None, float("nan"), float("inf")
    told = [str(n) for n in labels]
    told[11] = None
    table = {"a": pa.array(a, pa.float64()), "b": values[:, 0, 1], "label": told}
    pq.write_table(pa.table(table), tmp_path / "t.parquet")
    made = split(tmp_path / "t.parquet", settings_of())
    assert rejected(made) == [
        ("t.parquet", 3, "a is missing"),
        ("t.parquet", 7, "NaN"),
        ("t.parquet", 9, "an infinite value"),
        ("t.parquet", 11, "no label"),
    ]
    found = pa.concat_tables(
        made[name].to_dataset().data.table for name in ("train", "validation", "test")
    )
    kept = sorted(int(s.split(":")[1]) for s in found["source"].to_pylist())
    assert kept == [n for n in range(60) if n not in (3, 7, 9, 11)]
    place = found["source"].to_pylist().index("t.parquet:5")
    assert found["inputs"][place].as_py() == [values[5, 0, 0], values[5, 0, 1]]
    assert made["label_names"] == ["0", "1", "2"]


def test_ragged_lists_and_other_shapes_go_to_the_quarantine(tmp_path):
    values, labels = samples(40)
    lists = [row.ravel().tolist() for row in values]
    lists[4], lists[6] = lists[4][:5], [[1.0], [1.0, 2.0]]
    lists[6] = None
    table = {"x": pa.array(lists), "label": labels}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    np.savez(tmp_path / "b.npz", x=values[:, :1], label=labels)
    np.savez(tmp_path / "c.npz", x=values[:2].astype("<U8"), label=labels[:2])
    made = split(tmp_path, settings_of(), ["x"])
    found = rejected(made)
    assert found[:2] == [
        ("a.parquet", 4, "of shape (5,), others are of (6,)"),
        ("a.parquet", 6, "missing, ragged or no numbers"),
    ]
    assert ("b.npz", 0, "of shape (1, 3), others are of (6,)") in found
    assert ("c.npz", 1, "the values are no numbers (<U8)") in found
    assert made["report"].value()["rows_in"] == 82
    assert sum(made["report"].value()["rows_out"].values()) == 38


def test_too_many_rejected_and_files_that_cannot_be_read_are_errors(tmp_path):
    values, labels = samples(40)
    values[:5] = np.nan
    np.savez(tmp_path / "a.npz", inputs=values, label=labels)
    strict = settings_of()
    fewer = strict.split.model_copy(update={"max_rejected_fraction": 0.1})
    strict = strict.model_copy(update={"split": fewer})
    with pytest.raises(ArraysError, match=r"5 of 40 samples .* 5 NaN.* row 0 of a.npz"):
        split(tmp_path / "a.npz", strict)["report"].value()
    (tmp_path / "b.npz").write_bytes(b"")
    with pytest.raises(ArraysError, match=r"b\.npz cannot be read"):
        split(tmp_path / "b.npz", strict)
    np.save(tmp_path / "c.npy", np.array([{}]), allow_pickle=True)
    np.save(tmp_path / "c.label.npy", np.array([1]))
    with pytest.raises(ArraysError, match=r"c\.npy cannot be read.*[Oo]bject"):
        split(tmp_path / "c.npy", strict)


@pytest.mark.parametrize("kind", ["npy", "h5"])
def test_other_files_give_the_rows_of_npz(tmp_path, kind):
    values, labels = samples(50)
    (tmp_path / "n").mkdir()
    np.savez(tmp_path / "n/x.npz", inputs=values, label=labels)
    file = tmp_path / kind / f"x.{kind}"
    file.parent.mkdir()
    if kind == "npy":
        np.save(file, values)
        np.save(file.with_name("x.label.npy"), labels)
    else:
        h5py = pytest.importorskip("h5py")
        with h5py.File(file, "w") as opened:
            opened["inputs"], opened["label"] = values, labels
    one, other = (split(f, settings_of()) for f in (tmp_path / "n", file))
    for name in ("train", "test"):
        tables = [made[name].to_dataset().data.table for made in (one, other)]
        assert tables[0]["inputs"].equals(tables[1]["inputs"])
        assert tables[0]["labels"].equals(tables[1]["labels"])


def test_hdf5_that_cannot_be_used_is_told_of(tmp_path):
    h5py = pytest.importorskip("h5py")
    values, labels = samples(40)

    def written(name, **arrays):
        with h5py.File(tmp_path / name, "w") as file:
            for key, value in arrays.items():
                file[key] = value
        return tmp_path / name

    file = written("a.h5", x=values, y=values, label=labels)
    with pytest.raises(ArraysError, match=r"a\.h5 has the arrays .*arrays\.inputs"):
        split(file, settings_of())["report"].value()
    with pytest.raises(ArraysError, match=r"has the arrays \['label', 'x', 'y'\]"):
        split(file, settings_of(), ["z"])["report"].value()
    assert split(file, settings_of(), ["y"])["report"].value()["rows_in"] == 40
    file = written("b.h5", inputs=values)
    with pytest.raises(ArraysError, match=r"b\.h5: nothing is called 'label'"):
        split(file, settings_of())
    file = written("c.h5", inputs=values, label=labels[:30])
    with pytest.raises(ArraysError, match=r"40 samples and 30 labels"):
        split(file, settings_of())["report"].value()
    file = written("d.h5", inputs=7.0, label=labels)
    with pytest.raises(ArraysError, match=r"d\.h5: inputs is one number"):
        split(file, settings_of())["report"].value()
    file = written("g.h5", inputs=np.full(40, b"text"), label=labels)
    with pytest.raises(ArraysError, match=r"g\.h5, row 0: the values are no numbers"):
        split(file, settings_of())["report"].value()
    values[3, 1, 1], values[5] = np.nan, -np.inf
    made = split(written("e.h5", inputs=values, label=labels), settings_of())
    assert rejected(made) == [("e.h5", 3, "NaN"), ("e.h5", 5, "an infinite value")]
    (tmp_path / "f.h5").write_bytes((tmp_path / "e.h5").read_bytes()[:900])
    with pytest.raises(ArraysError, match=r"f\.h5 cannot be read"):
        split(tmp_path / "f.h5", settings_of())


def test_one_class_is_none(tmp_path):
    values, labels = samples(40)
    np.savez(tmp_path / "a.npz", inputs=values, label=np.zeros_like(labels))
    with pytest.raises(ArraysError, match="all samples are of one class, '0'"):
        split(tmp_path / "a.npz", settings_of())


def test_a_number_a_sample_is_a_sample(tmp_path):
    values, labels = samples(60)
    np.savez(tmp_path / "a.npz", inputs=values[:, 0, 0], label=labels)
    train = split(tmp_path / "a.npz", settings_of())["train"].to_dataset()
    assert np.array(train["inputs"]).shape[1:] == (1,)


def test_a_sample_keeps_its_split_and_equal_ones_share_it(tmp_path):
    values, labels = samples(100)
    np.savez(tmp_path / "a.npz", inputs=values, label=labels)
    turned = np.concatenate([values[::-1], values[:50]])
    told = np.concatenate([labels[::-1], labels[:50]])
    np.savez(tmp_path / "b.npz", inputs=turned, label=told)
    found = []
    for name in ("a.npz", "b.npz"):
        made = split(tmp_path / name, settings_of())
        rows = {s: made[s].to_dataset()["inputs"] for s in ("train", "test")}
        found.append({s: {str(row) for row in rows[s]} for s in rows})
    assert found[0] == found[1]
    assert not found[1]["train"] & found[1]["test"]
    assert made["report"].value()["repeated"] == 50


def test_statistics_are_those_of_train_and_kept_with_the_model(tmp_path):
    job = job_of(tmp_path, max_steps=2)
    values = np.stack(job.train.views(np.arange(len(job.train)))).reshape(-1, 6)
    config = build_model(job).config
    np.testing.assert_allclose(config.input_mean, values.mean(0), rtol=1e-5)
    np.testing.assert_allclose(config.input_deviation, values.std(0), rtol=1e-5)
    result = run_job(job)
    saved = load_pretrained(result.last_model_folder)
    torch.testing.assert_close(saved.mean, torch.tensor(config.input_mean))


class Plain(nn.Module):
    """The same network, by hand."""

    def __init__(self, weights, mean, deviation):
        super().__init__()
        self.w = nn.ParameterDict(
            {name.replace(".", "_"): nn.Parameter(t.clone()) for name, t in weights}
        )
        self.mean, self.deviation = mean, deviation

    def linear(self, name, x):
        return x @ self.w[f"{name}_weight"].T + self.w[f"{name}_bias"]

    def norm(self, name, x):
        weight, bias = self.w[f"{name}_weight"], self.w[f"{name}_bias"]
        return nn.functional.layer_norm(x, (8,), weight, bias)

    def forward(self, x):
        x = self.linear("embedding", (x - self.mean) / self.deviation)
        for n in range(2):
            inner = self.linear(f"layers_{n}_wide", self.norm(f"layers_{n}_norm", x))
            x = x + self.linear(f"layers_{n}_narrow", nn.functional.gelu(inner))
        return self.linear("classifier", self.norm("norm", x))


def plain_losses(job: TrainJob, steps: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of the first weights, by step."""
    torch.manual_seed(job.settings.runtime.seed)
    start = build_model(job)
    values = np.stack(job.train.views(np.arange(len(job.train)))).reshape(-1, 6)
    mean, deviation = values.astype(np.float64).mean(0), values.astype(float).std(0)
    facts = [torch.tensor(part, dtype=torch.float32) for part in (mean, deviation)]
    model = Plain(list(start.named_parameters()), *facts)
    batches = GlobalBatches(len(job.train), 16, job.settings.runtime.seed)
    losses = []
    for step in range(steps):
        rows = batches.rows(step)
        logits = model(torch.tensor(values[rows]))
        labels = torch.tensor(job.train.labels_of(rows))
        loss = nn.functional.cross_entropy(logits, labels)
        model.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        losses.append((loss.item(), norm.item()))
    return losses


@pytest.mark.parametrize("budget", ["auto", 16, 5, 1])
def test_loss_and_gradient_are_those_of_plain_pytorch(tmp_path, budget):
    job = job_of(tmp_path, token_budget=budget, max_steps=4, learning_rate=1e-12)
    result = run_job(job)
    found = [(p.loss, p.grad_norm) for p in result.history]
    np.testing.assert_allclose(found, plain_losses(job, 4), rtol=2e-4)


@pytest.mark.process
def test_two_ranks_train_the_same_model(tmp_path):
    set_up(settings_of().runtime)
    alone = run_job(job_of(tmp_path / "one", max_steps=6))
    two = {"distributed": {"num_processes": 2}, "token_budget": 5}
    job = job_of(tmp_path / "two", max_steps=6, **two)
    pair = run_job(job)
    files = [r.last_model_folder / "model.safetensors" for r in (alone, pair)]
    one, other = map(load_file, files)
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=2e-4)


def test_a_training_that_was_killed_goes_on(tmp_path):
    every = {"checkpoint": {"every_steps": 2, "keep": 2}}
    whole = run_job(job_of(tmp_path / "whole", max_steps=8, **every))
    job = job_of(tmp_path / "cut", max_steps=8, **every)
    with pytest.raises(Crash), when_logged("step 5/8", crash):
        run_job(job)
    again = run_job(replace(job))
    assert again.report.resumed_from_step in (2, 4)
    assert curve(again)[-4:] == curve(whole)[-4:]


def test_regression_learns_a_plain_function(tmp_path):
    generator = np.random.default_rng(1)
    values = generator.normal(size=(300, 4)).astype(np.float32)
    target = values @ np.array([1.0, -2.0, 0.5, 0.0]) + 3
    np.savez(tmp_path / "a.npz", inputs=values, label=target)
    settings = settings_of(task="regression", epochs=20)
    made = split(tmp_path / "a.npz", settings)
    rows = [
        ArrayRows.from_dataset(made[name].to_dataset())
        for name in ("train", "validation", "test")
    ]
    places = tmp_path / "run", tmp_path / "metrics.jsonl"
    job = TrainJob(settings, *rows, None, (), *places, "k")
    result = run_job(job)
    assert result.report.validation_loss < 0.1 * float(np.var(target))


def test_csv_is_read_as_pandas_reads_it(tmp_path):
    """Whole numbers first, fractions later; a semicolon; a gap; labels of words."""
    lines = ["a;b;label", *(f"{n};{n};red" for n in range(5)), "0.5;;blue", "7;1e3;red"]
    file = tmp_path / "numbers.csv"
    file.write_text("\n".join(lines) + "\n")
    expected = pd.read_csv(file, sep=";")
    source = ArrayFiles(file, (), "label")
    [window] = source.windows()
    assert window.faults == {5: "b is missing"}
    kept = [row for row in range(7) if row != 5]
    np.testing.assert_array_equal(window.values[kept], expected[["a", "b"]].iloc[kept])
    assert list(window.labels) == list(source.labels()) == list(expected["label"])
    (tmp_path / "cut.csv").write_text("a,label\n1,2,3\n")
    with pytest.raises(ArraysError, match=r"cut\.csv cannot be read: .*columns"):
        list(ArrayFiles(tmp_path / "cut.csv", (), "label").windows())


def test_an_ending_in_capitals_is_of_the_same_kind(tmp_path):
    columns = {"a": [1.0, 2.5], "b": [3.0, 4.0], "label": ["red", "blue"]}
    pd.DataFrame(columns).to_parquet(tmp_path / "X.PARQUET")
    [window] = ArrayFiles(tmp_path, (), "label").windows()
    np.testing.assert_array_equal(window.values, [[1.0, 3.0], [2.5, 4.0]])
    assert list(window.labels) == ["red", "blue"]
