"""Samples of a fixed shape apart from training: predictions, MLflow, trials and
sweeps."""

import shutil
from dataclasses import asdict, replace

import mlflow
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from PIL import Image

from flatout.datasets import TransformersModel
from flatout.engine.arrays import sources
from flatout.engine.benchmark.rungs import rungs
from flatout.engine.benchmark.runner import Bench
from flatout.engine.files.calibration import Calibration
from flatout.engine.launch.job_files import JobFiles
from flatout.engine.launch.launch import run_job
from flatout.engine.models.building import ModelError, load_pretrained
from flatout.engine.parameters import parse_settings
from flatout.engine.predict.predicting import predict_samples
from flatout.engine.rows import arrays as array_rows
from flatout.engine.sweep.sweep import run_sweep
from flatout.project.saved_model import saved_model
from flatout.tracking.logged_models import _load_pyfunc, log_sample_model
from flatout.tracking.models import log_and_register
from flatout.tracking.store import connect
from tests.engine import test_arrays as arrays, test_images as images
from tests.engine.benches import ONE_WINDOW
from tests.engine.plain import on_two_ranks
from tests.engine.runs import crashed, curve

KINDS = ("arrays", "images")


def made(kind, folder, **train):
    """Return a job of this kind."""
    return {"arrays": arrays, "images": images}[kind].job_of(folder, **train)


@pytest.mark.parametrize(
    ("kind", "keep"), [("arrays", None), ("images", "pixels"), ("images", "files")]
)
def test_windows_of_few_bytes_give_the_rows_and_figures_of_large_ones(
    tmp_path, monkeypatch, kind, keep
):
    options, found = {"keep": keep} if keep else {}, []
    for number, (at_once, window) in enumerate(((2**22, 2**26), (60, 700))):
        monkeypatch.setattr(array_rows, "VALUES_AT_ONCE", at_once)
        monkeypatch.setattr(sources, "WINDOW_BYTES", window)
        rows = made(kind, tmp_path / str(number), **options).train
        values = np.stack(rows.views(np.arange(len(rows)))).astype(np.float64)
        flat = values.reshape(-1, 3 if kind == "images" else 6)
        np.testing.assert_allclose(rows.facts.mean, flat.mean(0), rtol=1e-5)
        np.testing.assert_allclose(rows.facts.deviation, flat.std(0), rtol=1e-5)
        found.append((values.tolist(), rows.table["labels"].to_numpy().tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_that_was_killed_goes_on(kind, tmp_path):
    """Random crops and flips are also the same."""
    options = {"checkpoint": {"every_steps": 2, "keep": 2}, "max_steps": 8}
    if kind == "images":
        options |= {"config": images.CONVNEXT, "crop_area": 0.5}
    job = made(kind, tmp_path / "whole", **options)
    whole = run_job(job)
    cut = replace(job, work_folder=tmp_path / "cut/run")
    cut = replace(cut, metrics_file=tmp_path / "cut/metrics.jsonl")
    crashed(cut, "step 5/8")
    again = run_job(replace(cut))
    assert again.report.resumed_from_step in (2, 4)
    assert curve(again)[-4:] == curve(whole)[-4:]
    files = [r.last_model_folder / "model.safetensors" for r in (again, whole)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.process
def test_two_ranks_have_the_gradient_of_plain_pytorch(tmp_path):
    options = {"max_steps": 3, "learning_rate": 1e-12}
    jobs = {
        name: made(
            kind, tmp_path / "jobs" / name, token_budget=budget, **own, **options
        )
        for name, kind, budget, own in (
            ("arrays", "arrays", 5, {}),
            ("vit", "images", "auto", {"config": images.VIT}),
            ("vit_3", "images", 3, {"config": images.VIT}),
            ("convnext_3", "images", 3, {"config": images.CONVNEXT}),
        )
    }
    for name, (_, result) in on_two_ranks(jobs, tmp_path).items():
        found = [(p.loss, p.grad_norm) for p in result.history]
        plain = (arrays if name == "arrays" else images).plain_losses(jobs[name], 3)
        np.testing.assert_allclose(found, plain, rtol=1e-3, err_msg=name)


@pytest.fixture(scope="module", params=KINDS)
def trained(request, tmp_path_factory):
    """The kind, the job, and the folder of a trained model."""
    folder = tmp_path_factory.mktemp(request.param)
    job = made(request.param, folder, max_steps=3, epochs=1)
    return request.param, job, run_job(job).last_model_folder


def new_files(kind, folder, job):
    """Write a broken file, a file of another type, and samples without labels."""
    folder.mkdir()
    good = np.stack(job.test.views(np.arange(6)))
    if kind == "arrays":
        values = np.concatenate([good, good])
        values[2, 0, 0], values[4, 1, 1] = np.nan, np.inf
        np.savez(folder / "a.npz", values=values[:6])
        np.savez(folder / "b.npz", values=good[:, :, :2])
        return folder, good, {("a.npz", 2): "NaN", ("a.npz", 4): "an infinite value"}
    for number, pixels in enumerate(good):
        Image.fromarray(pixels).save(folder / f"{number}.png")
    (folder / "2.png").write_bytes((folder / "2.png").read_bytes()[:-30])
    (folder / "4.png").write_bytes(b"")
    found = {
        ("2.png", 0): "truncated or broken",
        ("4.png", 0): "not an image of a known kind",
    }
    return folder, good, found


def plain_shares(folder, job, samples):
    """Return probabilities computed by the model alone, as its config specifies."""
    model = load_pretrained(folder).eval()
    values = torch.tensor(samples).float()
    with torch.no_grad():
        if hasattr(model.config, "image_mean"):
            mean, deviation = model.config.image_mean, model.config.image_std
            standard = (values - torch.tensor(mean)) / torch.tensor(deviation)
            logits = model(pixel_values=standard.permute(0, 3, 1, 2)).logits
        else:
            logits = model(inputs=values).logits
    return logits.softmax(-1).numpy()


def shares_of(table):
    return table[[n for n in table if n.startswith("probability_")]].to_numpy(float)


def test_new_samples_are_predicted_and_what_is_broken_keeps_its_place(
    trained, tmp_path
):
    kind, job, model = trained
    folder, good, wanted = new_files(kind, tmp_path / "new", job)
    made = predict_samples(load_pretrained(model), folder, kind, job.settings)
    table = pa.Table.from_batches(made.batches(), made.schema).to_pandas()
    assert len(table) == (12 if kind == "arrays" else 6)
    first = table[table["source"] != "b.npz"]
    told = first[first["reason"].notna()]
    places = zip(told["source"], told["row"], strict=True)
    reasons = dict(zip(places, told["reason"], strict=True))
    assert reasons.keys() == wanted.keys()
    assert all(wanted[place] in reasons[place] for place in wanted)
    assert told["label"].isna().all() and np.isnan(shares_of(told)).all()
    usable = [0, 1, 3, 5]
    expected = plain_shares(model, job, good[usable])
    np.testing.assert_allclose(shares_of(first.iloc[usable]), expected, atol=1e-5)
    best = [job.label_names[n] for n in expected.argmax(1)]
    assert first.iloc[usable]["label"].tolist() == best
    other = table[table["source"] == "b.npz"]["reason"]
    assert all("of shape (2, 2), but others have shape (2, 3)" in why for why in other)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_far_from_the_mean_are_predicted_as_without_overflow(dtype, tmp_path):
    job = made("arrays", tmp_path / "job", max_steps=3, epochs=1)
    model = run_job(job).last_model_folder
    samples = np.stack(job.test.views(np.arange(3))).astype(dtype)
    samples[1, 0, 0], samples[2, 1, 1] = 1e30, -3e38
    exact = load_pretrained(model).double().train()  # fp64 without limits
    assert exact.config.dropout == 0
    expected = exact(inputs=torch.tensor(samples).float()).logits.softmax(-1)
    np.savez(tmp_path / "a.npz", values=samples)
    args = load_pretrained(model), tmp_path / "a.npz", "arrays", job.settings
    found = predict_samples(*args)
    table = pa.Table.from_batches(found.batches(), found.schema).to_pandas()
    for answers in (table, _load_pyfunc(str(model)).predict(samples)):
        shares = shares_of(answers)
        np.testing.assert_allclose(shares, expected.detach(), atol=1e-5)


def test_a_model_of_texts_is_refused(tmp_path):
    from tests.engine.families import built

    with pytest.raises(ModelError, match="is a bert, which reads texts"):
        predict_samples(
            built("bert", "sequence-classification"),
            tmp_path,
            "images",
            arrays.settings_of(),
        )


def saved(folder, job):
    """Return the description of the job's model, which is in the catalog's folder."""
    entry, model = TransformersModel(filepath=str(folder)), load_pretrained(folder)
    report = {"validation_loss": 0.5, "token_key": "k"}
    rows = Dataset(job.test.table)
    return saved_model(entry, model, folder, job.settings, rows, report)


def test_mlflow_loads_the_model_and_predicts(trained, store, tmp_path):
    _, job, folder = trained
    client = connect(store)
    samples = np.stack(job.test.views(np.arange(5)))
    run = client.create_run(client.create_experiment("own", str(tmp_path / "kept")))
    mlflow.set_experiment(experiment_id=run.info.experiment_id)
    uri = log_sample_model(saved(folder, job), run.info.run_id)
    model = mlflow.pyfunc.load_model(uri)
    (spec,) = model.metadata.signature.inputs.inputs
    assert (spec.type, spec.shape) == (samples.dtype, (-1, *samples.shape[1:]))
    names = [column.name for column in model.metadata.signature.outputs.inputs]
    answers = model.predict(samples)
    assert isinstance(answers, pd.DataFrame) and list(answers) == names
    expected = plain_shares(folder, job, samples)
    np.testing.assert_allclose(shares_of(answers), expected, atol=1e-5)
    with pytest.raises(mlflow.MlflowException, match="Failed to enforce schema"):
        model.predict(samples[:, :1])
    empty = model.predict(samples[:0])  # of an empty part of a Spark table
    assert list(empty) == names and empty.empty


def test_a_record_of_an_earlier_version_is_sent_without_a_signature(
    trained, store, tmp_path
):
    """Earlier versions recorded a file with a sample instead of its shape."""
    _, job, folder = trained
    client = connect(store)
    run = client.create_run(client.create_experiment("old", str(tmp_path / "kept")))
    old = {**asdict(saved(folder, job)), "example": str(tmp_path / "example.npy")}
    for name in ("shape", "dtype", "outputs"):
        del old[name]
    model = mlflow.pyfunc.load_model(log_and_register(client, old, run.info.run_id))
    samples = np.stack(job.test.views(np.arange(5)))
    expected = plain_shares(folder, job, samples)
    np.testing.assert_allclose(shares_of(model.predict(samples)), expected, atol=1e-5)


def test_mlflow_finds_the_columns_of_a_table_by_name(store, tmp_path):
    random = np.random.default_rng(0)
    frame = pd.DataFrame(random.normal(size=(60, 2)), columns=["a", "b"])
    (file := tmp_path / "t.csv").write_text(
        frame.assign(label=frame["a"] > 0).to_csv(index=False)
    )
    settings = arrays.settings_of(max_steps=5)
    made = arrays.split(file, settings)
    job = arrays.samples_job(tmp_path, settings, made)
    job.train.facts.names = made["train"].facts()["tokens"]["names"]
    folder = run_job(job).last_model_folder
    experiment = connect(store).create_experiment("table", str(tmp_path / "kept"))
    run = connect(store).create_run(experiment)
    mlflow.set_experiment(experiment_id=experiment)
    samples = frame.to_numpy("float32")
    uri = log_sample_model(saved(folder, job), run.info.run_id)
    model = mlflow.pyfunc.load_model(uri)
    expected = plain_shares(folder, job, samples)
    for given in (frame, frame[["b", "a"]], frame.assign(c="x")[["c", "b", "a"]]):
        np.testing.assert_allclose(shares_of(model.predict(given)), expected, atol=1e-5)
    with pytest.raises(mlflow.MlflowException, match=r"missing inputs \['a'\]"):
        model.predict(frame[["b"]])
    for broken, why in (("x", "NaN"), (None, "NaN"), (1e39, "an infinite value")):
        said = rf"^1 of 60 samples .* sample 1 \(counted from 0\): {why}\. .* \(2,\)"
        with pytest.raises(ValueError, match=said):
            cells = [*frame["a"][:1], broken, *frame["a"][2:]]
            model.predict(frame.assign(a=cells))


def test_mlflow_answers_by_the_calibration(trained, tmp_path):
    _, job, folder = trained
    shutil.copytree(folder, tmp_path / "model")
    names, thresholds = job.label_names, None
    samples = np.stack(job.test.views(np.arange(6)))
    powers = plain_shares(folder, job, samples) ** 0.25
    expected = powers / powers.sum(1, keepdims=True)
    chosen = expected.argmax(1)
    if len(names) == 2:
        middle = float(np.median(expected[:, 1]))
        thresholds, chosen = {names[1]: middle}, (expected[:, 1] > middle) * 1
    Calibration(4.0, thresholds).save(tmp_path / "model")
    answers = _load_pyfunc(str(tmp_path / "model")).predict(samples)
    np.testing.assert_allclose(shares_of(answers), expected, atol=1e-5)
    assert answers["label"].tolist() == [names[number] for number in chosen]


def files_of(job, folder) -> JobFiles:
    return JobFiles.of(job, folder / "rows", "key")


@pytest.mark.process
def test_a_trial_of_the_benchmark(tmp_path, warm_trials):
    job = made("arrays", tmp_path / "job")
    dumped = job.settings.model_dump(mode="json")
    settings = parse_settings({**dumped, "benchmark": ONE_WINDOW})
    bench = Bench(settings, files_of(job, tmp_path), tmp_path / "sweep")
    bench.start()
    trial = bench.run("end_to_end", {"train.global_batch_size": 8})
    assert (trial.status, trial.strategy) == ("ok", "fixed"), trial.note
    assert trial.samples_per_s == pytest.approx(8000 / trial.total_ms)
    assert trial.padding_pct == 0
    assert min(trial.io_ms, trial.forward_ms, trial.backward_ms) > 0


def test_nothing_that_spares_padding_is_tried(tmp_path):
    job = made("arrays", tmp_path / "job")
    names = [rung.name for rung in rungs(job.settings)]
    assert "fused AdamW" in names
    assert not any("packed" in n or "sorted" in n or "pad " in n for n in names)
    bench = Bench(job.settings, files_of(job, tmp_path), tmp_path / "sweep")
    facts = bench.rows.facts
    assert (facts.longest, facts.mean_length) == (1, 1.0)


@pytest.mark.process
def test_a_sweep_of_one_rate(tmp_path, warm_trials):
    job = made("images", tmp_path / "job", max_steps=2, epochs=1)
    swept = {
        "folder": str(tmp_path / "sweep"),
        "storage": str(tmp_path / "sweep.db"),
        "grid": {"train.learning_rate": [0.01]},
    }
    dumped = job.settings.model_dump(mode="json")
    (line,) = run_sweep(
        parse_settings({**dumped, "sweep": swept}), files_of(job, tmp_path)
    )
    assert line["status"] == "ok", line
    assert line["steps"] == 2 and 0 <= line["validation_accuracy"] <= 1
