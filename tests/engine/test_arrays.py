"""Numeric samples of a fixed shape: reading, checks, splits, and training compared with
plain PyTorch."""

import os
import shutil

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.preprocessing import StandardScaler
from torch import nn

from flatout.engine.arrays import sources
from flatout.engine.arrays.array_files import ArrayFiles
from flatout.engine.arrays.recipes import array_recipes
from flatout.engine.arrays.sources import WINDOW_ROWS, ArraysError, FilesKey
from flatout.engine.data.raw_texts import RawTextsError
from flatout.engine.data.readers.csv_reader import CsvReader
from flatout.engine.data.split import SplitError
from flatout.engine.files.content_key import ContentKey, file_hash
from flatout.engine.launch.launch import run_job
from flatout.engine.models.building import ModelError, load_pretrained
from flatout.engine.parameters import SettingsError
from flatout.engine.predict.predicting import predict_samples
from flatout.engine.rows.arrays import ArrayFacts
from flatout.engine.rows.layout import Layout
from flatout.engine.train.setup.assemble import build_model
from flatout.engine.train.setup.job import TrainJob
from tests.engine.plain import step_losses
from tests.make import samples_job, samples_settings

MODEL = {
    "model_type": "residual_mlp",
    "num_hidden_layers": 2,
    "hidden_size": 8,
}


def settings_of(**train):
    model = {"task": train.pop("task", "sequence-classification"), "config": MODEL}
    return samples_settings("arrays", model, train={"learning_rate": 1e-2, **train})


def samples(count: int, classes: int = 3):
    generator = np.random.default_rng(5)
    labels = generator.integers(0, classes, count)
    values = generator.normal(size=(count, 2, 3)) * 4 + labels[:, None, None]
    return values.astype(np.float32), labels


def split(path, settings, inputs=()):
    own = settings.arrays.model_copy(update={"inputs": list(inputs)})
    return array_recipes(path, settings.split, own, settings.model)


def job_of(folder, count=200, **train) -> TrainJob:
    settings = settings_of(**train)
    values, labels = samples(count)
    folder.mkdir(exist_ok=True, parents=True)
    np.savez(folder / "a.npz", inputs=values, label=labels)
    return samples_job(folder, settings, split(folder / "a.npz", settings))


def test_a_missing_size_is_refused(tmp_path):
    job = job_of(tmp_path)
    job.settings.model.config["hidden_size"] = None
    with pytest.raises(ModelError, match=r"hidden_size is None: set at least 1"):
        build_model(job)


def rejected(made) -> list[tuple[str, int, str]]:
    rows = made["rejected"].table().to_pylist()
    return [(row["source"], row["row"], row["reason"]) for row in rows]


VALUES, LABELS = samples(40)
LISTS = [row.ravel().tolist() for row in VALUES]
BOTH = {"x": VALUES, "y": VALUES, "label": LABELS}


def not_utf8(row, text="x"):
    """Return texts, one of which is not valid UTF-8."""
    texts = [text.encode()] * 40
    texts[row] = b"\xe9"
    texts[0] = b"2"
    offsets, values = np.cumsum([0, *map(len, texts)]), b"".join(texts)
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(values)]
    return pa.StringArray.from_buffers(40, *buffers[1:])


LONG = [f"{n},1.5,{n % 3}" for n in range(WINDOW_ROWS)]
ODD = VALUES.copy()
ODD[3, 1, 1], ODD[5] = np.nan, -np.inf


def write(path, found):
    """Write arrays by name, lines of a CSV file, or bytes."""
    kind = path.suffix.lower()
    if isinstance(found, bytes):
        path.write_bytes(found)
    elif kind == ".csv":
        path.write_text("\n".join(found) + "\n")
    elif kind == ".h5":
        with pytest.importorskip("h5py").File(path, "w") as opened:
            for name, values in found.items():
                opened[name] = values
    elif kind == ".parquet":
        columns = {
            n: list(v) if isinstance(v, np.ndarray) else v for n, v in found.items()
        }
        pq.write_table(pa.table(columns), path)
    else:
        np.savez(path, **found)
    return path


@pytest.mark.parametrize(
    ("name", "found", "inputs", "said"),
    [
        ("a.h5", BOTH, [], r"a\.h5 has the arrays .*arrays\.inputs"),
        ("a.npz", BOTH, ["z"], r"has the arrays \['label', 'x', 'y'\]"),
        ("a.h5", {"inputs": VALUES}, [], r"a\.h5: no array is called 'label'"),
        (
            "a.h5",
            {"inputs": VALUES, "label": LABELS[:30]},
            [],
            "40 samples and 30 labels",
        ),
        ("a.h5", {"inputs": 7.0, "label": LABELS}, [], "inputs is one number"),
        (
            "a.h5",
            {"inputs": np.full(40, b"text"), "label": LABELS},
            [],
            r"a\.h5: the values are \|S4, not numbers",
        ),
        ("a.npz", {"inputs": VALUES, "label": np.eye(3)}, [], "labels have the shape"),
        ("a.npz", {"inputs": VALUES, "label": np.array(3)}, [], "labels have the sha"),
        ("b.npz", b"", [], r"b\.npz cannot be read"),
        ("b.npz", b"PK\x03\x04 and no more", [], r"b\.npz cannot be read"),
        ("b.h5", b"\x89HDF\r\n\x1a\n and no more", [], r"b\.h5 cannot be read"),
        (
            "c.npz",
            {"inputs": np.array([{}]), "label": [1]},
            [],
            r"c\.npz cannot be read.*[Oo]bject",
        ),
        ("c.npy", b"", [], r"c\.npy has a file type other than .* use numpy"),
        (
            "a.csv",
            ["a,b,label", *(f"x{n},1,{n}" for n in range(9))],
            [],
            "column a is string, not a number",
        ),
        ("a.csv", ["label", "1", "2"], [], "no column but the label 'label'"),
        ("a.csv", ["a,a,label", "1,2,3", "1,2,4"], [], "'a', which is there twice"),
        (
            "a.csv",
            ["a,label,label", "1,2,3", "1,2,4"],
            [],
            "split.label_column is 'label', which is there twice",
        ),
        (
            "a.csv",
            "a,label\n1,caf\xe9\n".encode("cp1252"),
            [],
            r"a\.csv is not utf-8 \(byte 0xe9\)\. Save it as UTF-8",
        ),
    ],
)
def test_files_of_no_use_are_refused(tmp_path, name, found, inputs, said):
    with pytest.raises((ArraysError, RawTextsError, SplitError), match=said):
        path = write(tmp_path / name, found)
        split(path, settings_of(), inputs)["report"].value()


@pytest.mark.parametrize(
    ("name", "found", "reasons"),
    [
        (
            "e.h5",
            {"inputs": ODD, "label": LABELS},
            {3: "NaN", 5: "an infinite value"},
        ),
        (
            "a.parquet",
            {
                "x": [[1.0], *LISTS[1:4], LISTS[4][:5], None, *LISTS[6:]],
                "label": LABELS,
            },
            {
                0: "of shape (1,), but others have shape (6,)",
                4: "of shape (5,), but others have shape (6,)",
                5: "missing, ragged or no numbers",
            },
        ),
        (
            "t.parquet",
            {
                "a": [1.0, None, np.nan, np.inf, *range(36)],
                "b": LABELS,
                "label": [*map(str, LABELS[:39]), None],
            },
            {
                1: "a is missing or not a number",
                2: "NaN",
                3: "an infinite value",
                39: "label is missing",
            },
        ),
        (
            "u.parquet",
            {"a": LABELS, "b": not_utf8(7, "1.5"), "label": not_utf8(5)},
            {5: "label is not valid Unicode", 7: "b is missing or not a number"},
        ),
        (
            "u.h5",
            {"inputs": VALUES, "label": np.array(5 * [b"x"] + [b"\xe9"] + 34 * [b"y"])},
            {5: "label is not valid Unicode"},
        ),
        (
            "t.csv",
            ["a,b,label", *LONG[:4], "?,1.5,0", *LONG[4:], "2.5,n/k,0"],
            {
                4: "a is missing or not a number",
                WINDOW_ROWS + 1: "b is missing or not a number",
            },
        ),
        (
            "cut.csv",
            ["a,b,label", "1,2", *LONG[:4], "1,2,3,4", *LONG[4:], "1"],
            {
                0: "2 fields instead of 3",
                5: "4 fields instead of 3",
                WINDOW_ROWS + 2: "1 fields instead of 3",
            },
        ),
    ],
)
def test_rows_of_no_use_are_told_by_their_place(tmp_path, name, found, reasons):
    """One invalid cell of a CSV file does not turn its column into text, even in a
    window of its own."""
    made = split(write(tmp_path / name, found), settings_of())
    assert rejected(made) == [(name, row, why) for row, why in reasons.items()]


@pytest.mark.parametrize("name", ["X.H5", "x.parquet"])
def test_other_files_give_the_rows_of_npz(tmp_path, name):
    """Upper-case suffixes are recognised, and labels may be in a separate column."""
    found = {"inputs": VALUES.reshape(40, 6), "label": LABELS}
    (tmp_path / "n").mkdir()
    labels = {"label": LABELS[:, None]}
    files = write(tmp_path / "n/x.npz", found | labels), write(tmp_path / name, found)
    one, other = (split(file, settings_of()) for file in files)
    assert one["label_names"] == ["0", "1", "2"]
    for part in ("train", "test"):
        tables = [made[part].to_dataset().data.table for made in (one, other)]
        assert tables[0]["inputs"].equals(tables[1]["inputs"])
        assert tables[0]["labels"].equals(tables[1]["labels"])


def test_labels_that_are_all_numbers_are_sorted_by_value(tmp_path):
    lines = [f"{n},{('10.0', '9.0', '-1')[n % 3]}" for n in range(40)]
    file = write(tmp_path / "a.csv", ["a,label", *lines])
    assert split(file, settings_of())["label_names"] == ["-1", "9.0", "10.0"]


def test_an_index_of_pandas_is_no_input_unless_it_is_named(tmp_path):
    frame = pd.DataFrame({"a": np.arange(9.0), "label": 1}, index=range(0, 90, 10))
    frame[frame.a > 1].to_parquet(tmp_path / "a.parquet", index=True)
    [window] = ArrayFiles(tmp_path / "a.parquet", (), "label").windows()
    assert window.values.tolist() == [[n] for n in range(2, 9)]
    named = ("a", "__index_level_0__")
    [window] = ArrayFiles(tmp_path / "a.parquet", named, "label").windows()
    assert window.values[0].tolist() == [2, 20]


def test_shards_have_the_order_of_columns_of_the_first(tmp_path):
    """This is how pandas.concat aligns columns: by name."""
    (tmp_path / "1.csv").write_text("a,b,label\n1,2,x\n")
    (tmp_path / "2.csv").write_text("b,label,a\n4,y,3\n")
    windows = list(ArrayFiles(tmp_path, (), "label").windows())
    assert [w.values.tolist() for w in windows] == [[[1, 2]], [[3, 4]]]


def test_rows_keep_their_numbers_after_a_broken_row(tmp_path):
    lines = ["0,x", "1,2,3", "2,y", "3,z"]
    path = write(tmp_path / "a.csv", ["a,label", *lines])
    [window] = ArrayFiles(path, (), "label").windows()
    assert window.faults == {1: "3 fields instead of 2"}
    found = [
        (window.place(n)[1], window.values[n], window.labels[n]) for n in (0, 2, 3)
    ]
    assert found == [(0, [0.0], "x"), (2, [2.0], "y"), (3, [3.0], "z")]


def test_rejected_rows_show_their_cells(tmp_path):
    file = write(tmp_path / "t.csv", ["a,b,label", "?,1.5,0", "1,2", *LONG[:40]])
    rows = split(file, settings_of())["rejected"].table().to_pylist()
    assert [row["excerpt"] for row in rows] == ["?, 1.5, 0", "1,2"]
    values = VALUES.copy()
    values[3, 0, 0] = np.nan
    file = write(tmp_path / "v.npz", {"inputs": values, "label": LABELS})
    [row] = split(file, settings_of())["rejected"].table().to_pylist()
    cells = [*(f"{value:g}" for value in values[3].ravel()), str(LABELS[3])]
    assert row["excerpt"] == ", ".join(cells)


CELLS = ("2.csv", ["a,b,label", *LONG[:40]])


@pytest.mark.parametrize(
    ("name", "found", "second", "rows"),
    [
        ("1.csv", ["a,b,label"], CELLS, 0),
        ("1.csv", ["a,b,label", ",,x"], CELLS, 1),
        ("1.parquet", {"a": pa.nulls(2), "b": [1, 2], "label": [0, 1]}, CELLS, 2),
        (
            "1.parquet",
            {"x": [[], []], "label": [0, 1]},
            ("2.parquet", {"x": LISTS, "label": LABELS}),
            2,
        ),
    ],
)
def test_a_first_shard_without_numbers_stops_no_other(
    tmp_path, name, found, second, rows
):
    write(tmp_path / name, found)
    write(tmp_path / second[0], second[1])
    made = split(tmp_path, settings_of())
    assert [source for source, *_ in rejected(made)] == rows * [name]
    assert (
        sum(len(made[part].to_dataset()) for part in ("train", "validation", "test"))
        == 40
    )


def test_files_of_other_shapes_go_to_the_quarantine(tmp_path, caplog):
    write(tmp_path / "a.npz", {"x": VALUES[:, 0, 0], "label": LABELS})  # a number each
    write(tmp_path / "b.npz", {"x": VALUES[:, :1], "label": LABELS})
    made = split(tmp_path, settings_of(), ["x"])
    found = rejected(made)
    assert found[0] == ("b.npz", 0, "of shape (1, 3), but others have shape (1,)")
    assert len(found) == 40
    caplog.set_level("INFO")
    assert made["report"].plan.report["rejected"] == 40
    assert "0 validation, 3 test; 40 rejected" in caplog.text


class Plain(nn.Module):
    """The same network in plain PyTorch."""

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
    """Return the loss and the gradient norm by step, with the initial weights."""
    torch.manual_seed(job.settings.runtime.seed)
    start = build_model(job)
    values = np.stack(job.train.views(np.arange(len(job.train)))).reshape(-1, 6)
    mean, deviation = values.astype(np.float64).mean(0), values.astype(float).std(0)
    facts = [torch.tensor(part, dtype=torch.float32) for part in (mean, deviation)]
    model = Plain(list(start.named_parameters()), *facts)

    def logits_of(rows, _):
        return model(torch.tensor(values[rows]))

    return step_losses(job, model, steps, logits_of)


@pytest.mark.parametrize("budget", ["auto", 16, 5, 1])
def test_loss_and_gradient_are_those_of_plain_pytorch(tmp_path, budget):
    job = job_of(tmp_path, token_budget=budget, max_steps=4, learning_rate=1e-12)
    result = run_job(job)
    found = [(p.loss, p.grad_norm) for p in result.history]
    np.testing.assert_allclose(found, plain_losses(job, 4), rtol=2e-4)


def test_regression_learns_a_plain_function(tmp_path):
    generator = np.random.default_rng(1)
    values = generator.normal(size=(300, 4)).astype(np.float32)
    target = values @ np.array([1.0, -2.0, 0.5, 0.0]) + 3
    np.savez(tmp_path / "a.npz", inputs=values, label=target)
    steps = {"epochs": 8, "learning_rate": 3e-2, "evaluate_every": None}
    settings = settings_of(task="regression", log_every=10, **steps)
    made = split(tmp_path / "a.npz", settings)
    result = run_job(samples_job(tmp_path, settings, made))
    assert result.report.validation_loss < 0.1 * float(np.var(target))


def test_csv_is_read_as_pandas_reads_it(tmp_path):
    """The file has integers followed by fractions, a semicolon, a gap, and labels of
    words."""
    lines = ["a;b;label", *(f"{n};{n};red" for n in range(5)), "0.5;;blue", "7;1e3;red"]
    file = tmp_path / "numbers.csv"
    file.write_text("\n".join(lines) + "\n")
    expected = pd.read_csv(file, sep=";")
    source = ArrayFiles(file, (), "label")
    [window] = source.windows()
    assert window.faults == {5: "b is missing or not a number"}
    kept = [row for row in range(7) if row != 5]
    np.testing.assert_array_equal(window.values[kept], expected[["a", "b"]].iloc[kept])
    assert list(window.labels) == list(source.labels()) == list(expected["label"])


@pytest.mark.parametrize("kind", ["csv", "parquet", "npz"])
def test_unix_times_keep_their_differences(tmp_path, kind):
    """fp32 is rounded to 128 s there, but samples, splits and the model use exact
    values."""
    times = 1.7e9 + np.random.default_rng(0).uniform(0, 100, 400)
    label = (times > 1.7e9 + 50).astype(int)
    frame = pd.DataFrame({"time": times, "label": label})
    file = tmp_path / f"t.{kind}"
    if kind == "npz":
        np.savez(file, inputs=times[:, None], label=label)
    else:
        frame.to_csv(file, index=False) if kind == "csv" else frame.to_parquet(file)
    made = split(file, settings_of(max_steps=60))
    report = made["report"].value()
    assert report["repeated"] == 0
    assert min(report["rows_out"].values()) > 15
    job = samples_job(tmp_path, settings_of(max_steps=60), made)
    rows = [job.train, job.validation, job.test]
    given = np.concatenate([np.stack(r.views(np.arange(len(r)))) for r in rows])
    np.testing.assert_array_equal(np.sort(given[:, 0]), np.sort(times))
    if kind != "npz":
        return
    result = run_job(job)
    model = load_pretrained(result.last_model_folder).eval()
    inputs = torch.tensor(times[:, None])
    right = model(inputs).logits.argmax(1) == torch.tensor(label)
    assert right.float().mean() > 0.9


def test_the_state_of_files_decides_and_else_their_bytes(tmp_path, monkeypatch):
    """A file is replaced by one with the same size and modification time, or by a
    copy."""
    file, other = tmp_path / "a.npz", tmp_path / "b/a.npz"
    np.savez(file, np.zeros((40, 2)))
    shutil.copytree(tmp_path, tmp_path / "b")

    def key(path):
        return FilesKey({}, ArrayFiles(path, (), None).files)

    stored, read = ContentKey(key(file).stored()), []
    monkeypatch.setattr(
        sources, "file_hash", lambda path: read.append(path) or file_hash(path)
    )
    assert key(file).describes(stored) and not read
    assert key(other).describes(stored) and len(read) == 1
    np.savez(other, np.ones((40, 2)))
    stat = file.stat()
    other.replace(file)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_size == stat.st_size
    assert not key(file).describes(stored)


def test_a_csv_is_parsed_twice_and_a_pass_counts_afresh(tmp_path, monkeypatch):
    values, labels = samples(200)
    file = tmp_path / "t.csv"
    rows = zip(values[:, 0, :2], labels, strict=True)
    lines = [f"{a},{b},{c}" for (a, b), c in rows]
    file.write_text("\n".join(["a,b,label", *lines]) + "\n")
    read, parsed = CsvReader.batches, []
    monkeypatch.setattr(CsvReader, "batches", lambda *a: parsed.append(1) or read(*a))
    made = split(file, settings_of())
    once = made["train"].to_dataset()
    facts = dict(made["train"].facts())
    assert made["train"].to_dataset().to_dict() == once.to_dict()
    assert made["train"].facts() == facts and facts["tokens"]["num_rows"] == len(once)
    made["test"].to_dataset()
    assert len(parsed) == 2, "for the names of labels, and for the rows"


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((28,), "u1"), ((8, 8), "u1"), ((4, 4, 3), "u1"), ((2, 3), "f4")],
)
def test_models_keep_the_statistics_of_train(tmp_path, shape, kind):
    """Images have one mean and standard deviation per channel."""
    generator = np.random.default_rng(7)
    labels = generator.integers(0, 3, 120)
    values = generator.integers(0, 200, (120, *shape)) + 2 * np.arange(shape[-1])
    file = write(tmp_path / "a.npz", {"inputs": values.astype(kind), "label": labels})
    settings = settings_of(max_steps=2)
    job = samples_job(tmp_path, settings, split(file, settings))
    saved = load_pretrained(run_job(job).last_model_folder)
    train = np.stack(job.train.views(np.arange(len(job.train)))).astype(np.float64)
    assert job.train.views(np.array([0]))[0].dtype == kind
    axes = (0, 1, 2) if len(shape) == 3 else 0
    for found, wanted in (
        (saved.mean, train.mean(axes)),
        (saved.deviation, train.std(axes)),
    ):
        each = np.broadcast_to(wanted, shape).ravel()
        np.testing.assert_allclose(found.numpy(), each, rtol=1e-5)


def test_a_constant_beside_precise_times_has_a_deviation_of_one(tmp_path):
    """As in scikit-learn's StandardScaler, although 0.1 has no exact mean in fp64."""
    times = 1.7e9 + np.random.default_rng(0).uniform(0, 100, 400)
    file = tmp_path / "a.parquet"
    label = (times > 1.7e9 + 50).astype(int)
    pd.DataFrame({"time": times, "one": 0.1, "label": label}).to_parquet(file)
    recipe = split(file, settings_of())["train"]
    values = np.array(recipe.to_dataset()["inputs"])
    wanted, facts = StandardScaler().fit(values), ArrayFacts(**recipe.facts()["tokens"])
    assert facts.deviation[1] == wanted.scale_[1] == 1 and facts.mean[1] == 0.1
    np.testing.assert_allclose(facts.mean, wanted.mean_, rtol=1e-12)
    np.testing.assert_allclose(facts.deviation, wanted.scale_, rtol=1e-9)


def test_predict_reads_the_columns_of_the_training_by_name(tmp_path):
    values, label = samples(120)
    columns = dict(zip("abc", values[:, 0].T, strict=True))
    frame = pd.DataFrame({**columns, "label": label})
    frame.to_parquet(tmp_path / "train.parquet")
    settings = settings_of(max_steps=20)
    made = split(tmp_path / "train.parquet", settings)
    job = samples_job(tmp_path, settings, made)
    job.train.facts.names = made["train"].facts()["tokens"]["names"]
    folder = run_job(job).last_model_folder
    inputs = torch.tensor(values[:, 0])
    wanted = load_pretrained(folder).eval()(inputs).logits.softmax(1).detach().numpy()
    spare = frame.assign(spare=1.0)[["c", "spare", "a", "b"]]
    renamed = frame[[*"abc"]].set_axis([*"xyz"], axis=1)
    for number, table in enumerate((frame, spare, renamed)):
        table.to_parquet(file := tmp_path / f"{number}.parquet")
        made = predict_samples(load_pretrained(folder), file, "arrays", settings)
        found = pa.Table.from_batches(made.batches(), made.schema).to_pandas()
        shares = found[[f"probability_{n}" for n in job.label_names]].to_numpy()
        np.testing.assert_allclose(shares, wanted, rtol=1e-4, atol=1e-6)
    frame[[*"ab"]].to_parquet(file := tmp_path / "short.parquet")
    made = predict_samples(load_pretrained(folder), file, "arrays", settings)
    with pytest.raises(ArraysError, match=r"inputs\[2\] is 'c', which is not the"):
        list(made.batches())


@pytest.mark.parametrize("name", ["group_column", "split_column"])
def test_columns_that_only_the_split_of_texts_uses_are_refused(tmp_path, name):
    file = write(tmp_path / "a.npz", {"inputs": VALUES, "label": LABELS})
    settings = settings_of()
    options = settings.split.model_copy(update={name: "patient"})
    with pytest.raises(SettingsError, match=f"split.{name} is 'patient', which is for"):
        split(file, settings.model_copy(update={"split": options}))


@pytest.mark.parametrize("task", ["multi-label-classification", "reranking"])
def test_tasks_for_texts_only_are_refused(tmp_path, task):
    labels = pa.array([["a"], ["a", "b"]] * 20)
    file = write(tmp_path / "a.parquet", {"x": LABELS, "label": labels})
    with pytest.raises(SettingsError, match=f"model.task: {task} is for texts only"):
        split(file, settings_of(task=task))


def test_files_of_bytes_beside_files_of_numbers_are_all_numbers(tmp_path):
    values, labels = samples(60)
    whole = (values * 9 + 90).clip(0, 255).astype(np.uint8)
    np.savez(tmp_path / "a.npz", inputs=whole, label=labels)
    np.savez(tmp_path / "b.npz", inputs=whole.astype(float), label=labels)
    made = split(tmp_path, settings_of())
    data = made["train"].to_dataset()
    row = int(data["source"][0].split(":")[1])
    place = data["source"].index(f"a.npz:{row}")
    assert data["inputs"][place] == whole[row].astype(float).tolist()
    assert "float" in str(data.features["inputs"])
    twins = [name.replace("a.npz", "b.npz") for name in data["source"]]
    assert set(twins) == {n for n in data["source"] if n.startswith("b")}, "one split"
    assert made["report"].value()["rows_in"] == 120


def test_a_task_may_replace_the_samples(tmp_path):
    rows = job_of(tmp_path).train
    own = [np.full_like(view, 2) for view in rows.views(np.arange(3))]
    laid_out = rows.lay_out(np.arange(3), Layout(), own)
    assert np.array_equal(laid_out.fields["inputs"], np.stack(own))
