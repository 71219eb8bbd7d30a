"""A resumed run continues as if it had not been interrupted."""

import gc
import itertools
import json
import os
import random
import shutil
import signal
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pytest
import torch

from flatout.engine.checkpoints.checkpoint_folder import (
    CheckpointError,
    Manifest,
    finish,
    is_interrupted,
    read_manifest,
    step_folders,
    was_trained_now,
)
from flatout.engine.launch.launch import collect, run_job
from flatout.engine.launch.results import load_finished_result, write_result
from flatout.engine.machine.garbage import collect_rarely
from flatout.engine.machine.signals import Interrupted
from flatout.engine.parameters import SettingsError
from flatout.engine.train.loop import train
from flatout.engine.train.recording.metrics_file import MetricsFile
from flatout.engine.train.setup import assemble
from flatout.engine.train.step import Stepper, _LossScale
from tests.engine.runs import (
    CPU,
    NO_DROPOUT,
    Crash,
    changed,
    crash,
    crashed,
    curve,
    make_job as job_of,
    points,
    weights,
    when_logged,
)

make_job = partial(job_of, token_budget=240)
"""A job with one or two micro-batches per step."""
EVERY_2 = {"checkpoint": {"every_steps": 2, "keep": 2}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The run that all others must equal, with dropout."""
    job = make_job(tmp_path_factory.mktemp("undisturbed"), evaluate_every=3)
    result = run_job(job)
    return curve(result), weights(result), sorted(points(job)), result.report


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """The state after a crash of the same run at step 9."""
    folder = tmp_path_factory.mktemp("cut")
    crashed(make_job(folder, evaluate_every=3, **EVERY_2), "step 9/12  loss")
    return folder


@pytest.fixture
def crashed_at_9(cut, tmp_path):
    """The job of the crashed run, in a folder of the test."""
    shutil.copytree(cut, tmp_path, dirs_exist_ok=True)
    return make_job(tmp_path, evaluate_every=3, **EVERY_2)


def check(job, result, undisturbed) -> None:
    history, hashes, lines, report = undisturbed
    assert curve(result) == history
    assert weights(result) == hashes
    assert sorted(points(job)) == lines
    assert result.report.test_loss == report.test_loss
    assert result.report.initial_loss == report.initial_loss


@pytest.mark.parametrize(
    "moments",
    [
        ["step 3/12  loss"],  # in the first epoch, before its first evaluation
        ["step 6/12  validation_loss"],  # in an evaluation in the middle of an epoch
        ["step 9/12  loss"],
        ["step 12/12  validation_loss"],  # all steps are done, nothing is tested
        ["step 3/12  loss", "step 6/12  loss", "step 6/12  validation", "step 12/12"],
    ],
    ids=["step 3", "evaluation", "step 9", "end", "four times"],
)
def test_the_run_after_a_crash_equals_the_undisturbed_one(
    tmp_path, undisturbed, moments
):
    job = make_job(tmp_path, evaluate_every=3, **EVERY_2)
    for moment in moments:
        crashed(job, moment)
    result = run_job(job)
    assert result.report.resumed_from_step in range(2, 13)
    check(job, result, undisturbed)


def test_a_checkpoint_inside_of_a_window_keeps_the_windows_sums(tmp_path, undisturbed):
    """With log_every 3 and checkpoints at 2, 4, ..., the loss of step 6 spans the
    crash."""
    job = make_job(tmp_path, evaluate_every=3, **EVERY_2)
    crashed(job, "step 6/12  loss")
    newest = read_manifest(step_folders(job.work_folder)[0])
    assert newest.step % 3  # inside a window
    check(job, run_job(job), undisturbed)


def test_settings_of_the_execution_may_change_on_the_way(
    tmp_path, undisturbed, crashed_at_9
):
    other = make_job(
        tmp_path,
        evaluate_every=3,
        batching="grouped",
        token_budget=1000,
        loader={"num_workers": 1},
        checkpoint={"every_steps": 5, "keep": 1},
    )
    result = run_job(other)
    assert result.report.resumed_from_step in range(2, 9)
    assert [entry[0] for entry in curve(result)] == [3, 6, 9, 12]
    assert curve(result)[:2] == undisturbed[0][:2]


def test_a_stopped_run_goes_on_longer_like_one_that_was_always_longer(tmp_path):
    """The schedule does not depend on the number of steps."""
    options = {"schedule": "constant", "evaluate_every": None, **EVERY_2}
    crashed(make_job(tmp_path / "a", max_steps=9, **options), "step 6/9  loss")
    longer = run_job(make_job(tmp_path / "a", max_steps=12, **options))
    whole = run_job(make_job(tmp_path / "b", max_steps=12, **options))
    assert longer.report.resumed_from_step in range(2, 9)
    assert weights(longer) == weights(whole)


def test_resume_takes_the_newest_sound_checkpoint(undisturbed, caplog, crashed_at_9):
    job = crashed_at_9
    newest, older = step_folders(job.work_folder)
    sound = read_manifest(older).step
    data = bytearray((newest / "optimizer.safetensors").read_bytes())
    data[-7] ^= 1
    (newest / "optimizer.safetensors").write_bytes(data)
    result = run_job(job)
    assert result.report.resumed_from_step == sound
    assert "optimizer.safetensors was changed after it was written" in caplog.text
    check(job, result, undisturbed)


def test_no_sound_checkpoint_is_no_reason_to_start_anew(tmp_path):
    job = make_job(tmp_path, **EVERY_2)
    crashed(job, "step 6/12  loss")
    for folder in step_folders(job.work_folder):
        (folder / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"each of the . .*state\.json is miss"):
        run_job(job)


def test_changed_settings_and_tokens_are_refused_by_name(tmp_path, monkeypatch):
    job = make_job(tmp_path, **EVERY_2)
    crashed(job, "step 6/12  loss")
    other = changed(job, train={"learning_rate": 0.5, "adam_beta1": 0.8})
    other = replace(other, data_key="other")
    monkeypatch.setattr(assemble, "build", None)  # refused before the model is created
    with pytest.raises(CheckpointError) as refused:
        run_job(other)
    text = str(refused.value)
    assert "train.learning_rate: 0.001 -> 0.5" in text
    assert "train.adam_beta1: 0.9 -> 0.8" in text
    assert "token rows: 'k' -> 'other'" in text
    assert "train.resume: never" in text
    assert step_folders(job.work_folder)  # no file was changed


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    job = make_job(tmp_path, **EVERY_2)
    crashed(job, "step 6/12  loss")
    config = {**job.settings.model.config, "hidden_size": 32}
    other = changed(job, model={"config": config})
    with pytest.raises(CheckpointError, match=r"model\.config\.hidden_size: 16 -> 32"):
        run_job(other)


def test_never_starts_anew_and_no_later_resume_meets_the_old_run(tmp_path):
    job = make_job(tmp_path, **EVERY_2)
    crashed(job, "step 9/12  loss")
    fresh = make_job(tmp_path, resume="never", **EVERY_2)
    crashed(fresh, "step 3/12  loss")
    steps = [read_manifest(path).step for path in step_folders(job.work_folder)]
    assert steps == [2]
    assert run_job(job).report.resumed_from_step == 2


def test_resume_from_a_named_checkpoint_brings_its_best_model(
    tmp_path, undisturbed, crashed_at_9
):
    named = str(step_folders(crashed_at_9.work_folder)[0])
    job = make_job(tmp_path / "b", evaluate_every=3, resume=named, **EVERY_2)
    result = run_job(job)
    assert result.report.resumed_from_step in range(2, 9)
    assert curve(result) == undisturbed[0]
    assert weights(result) == undisturbed[1]


def test_a_named_checkpoint_that_does_not_exist_is_refused(tmp_path):
    job = make_job(tmp_path, resume=str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match=r"there is no folder .*nowhere"):
        run_job(job)


def test_a_finished_run_is_not_resumed(tmp_path):
    job = make_job(tmp_path, **EVERY_2)
    run_job(job)
    assert not is_interrupted(job.work_folder)
    again = run_job(job)
    assert again.report.resumed_from_step is None
    assert again.report.samples == 180


def test_a_result_that_nobody_took_is_handed_over_later(tmp_path):
    job = make_job(tmp_path, **EVERY_2)
    first = collect(job)  # and the process that launched it dies here
    assert is_interrupted(job.work_folder)
    assert step_folders(job.work_folder) == []
    second = collect(job)
    assert second.report == first.report
    assert curve(second) == curve(first)
    assert weights(second) == weights(first)
    (job.work_folder / "step-000000012").mkdir()  # not removed before the process died
    finish(job.work_folder)
    assert not is_interrupted(job.work_folder)


def test_rates_after_a_resume_count_the_steps_of_this_session(tmp_path):
    """Checkpoints are triggered by time, each as soon as the last one is written."""
    often = {"every_steps": None, "every_minutes": 1e-9}
    job = make_job(tmp_path, log_every=1, checkpoint=often)
    crashed(job, "step 9/12  loss")
    report = run_job(job).report
    assert report.resumed_from_step in range(1, 10)
    rows = [16, 16, 16, 12] * 3  # at each step: an epoch has 60 steps
    assert report.samples == sum(rows[report.resumed_from_step :])
    assert report.steps == 12
    assert report.first_batch_s > 0


def test_a_training_collects_garbage_as_usual_and_rates_leave_the_warm_up_out(tmp_path):
    usual = gc.get_threshold()
    collect_rarely()
    history = run_job(make_job(tmp_path, log_every=1)).history
    assert gc.get_threshold() == usual
    rated = [point.step for point in history if point.samples_per_s > 0]
    assert rated == list(range(4, 13))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_leaves_with_its_status(tmp_path, undisturbed, signum):
    job = make_job(tmp_path, evaluate_every=3, checkpoint={"every_minutes": None})
    kill = lambda: os.kill(os.getpid(), signum)  # noqa: E731
    before = signal.getsignal(signum)
    with pytest.raises(Interrupted) as stopped, when_logged("step 6/12  loss", kill):
        run_job(job)
    assert stopped.value.code == 128 + signum
    assert "stopped after step 6 of 12: saved" in str(stopped.value)
    assert signal.getsignal(signum) is before
    result = run_job(job)
    assert result.report.resumed_from_step == 6
    check(job, result, undisturbed)


def test_a_torn_last_line_of_the_metrics_file_is_cut_off(undisturbed, crashed_at_9):
    job = crashed_at_9
    with job.metrics_file.open("a") as file:
        file.write('{"step": 9, "time_s": 17')
    newest = read_manifest(step_folders(job.work_folder)[0]).step
    result = run_job(job)
    assert result.report.resumed_from_step == newest
    lines = job.metrics_file.read_text().splitlines()
    assert all(line.startswith("{") and line.endswith("}") for line in lines)
    check(job, result, undisturbed)


DAMAGED = (b"\0" * 40, b'{"step": 3, "metr', b'{"metrics": {"a": 1}}', b"[1]")


def test_damaged_lines_of_the_metrics_file_are_skipped(
    undisturbed, caplog, crashed_at_9
):
    job = crashed_at_9
    lines = job.metrics_file.read_bytes().splitlines()
    job.metrics_file.write_bytes(b"\n".join([lines[0], *DAMAGED, *lines[1:], b""]))
    result = run_job(job)
    assert "4 damaged lines are skipped" in caplog.text
    lines = job.metrics_file.read_bytes().splitlines()
    assert lines[1:5] == list(DAMAGED)  # the files are kept for diagnosis
    job.metrics_file.write_bytes(b"\n".join([lines[0], *lines[5:], b""]))
    check(job, result, undisturbed)


def test_two_runs_in_one_folder_are_refused(tmp_path, monkeypatch):
    from filelock import FileLock

    from flatout.engine.train.keeping import session

    monkeypatch.setattr(session, "LOCK_WAIT_S", 0.1)
    job = make_job(tmp_path)
    job.work_folder.mkdir(parents=True)
    with FileLock(job.work_folder / ".lock"):
        with pytest.raises(CheckpointError, match="another training uses"):
            run_job(job)


def test_a_checkpoint_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(CheckpointError, match=r"cannot be written .*paths\.checkpoi"):
        run_job(make_job(tmp_path))


def test_generators_of_other_libraries_go_on_too(tmp_path):
    """A custom model may use these generators."""
    from flatout.engine.machine.runtime import set_up
    from flatout.engine.train.keeping.snapshots import _set_generators, generator_state

    runtime = set_up(make_job(tmp_path).settings.runtime)
    random.gauss(0, 1)
    state = generator_state(runtime)
    drawn = (random.gauss(0, 1), np.random.rand(), torch.rand(2).tolist())
    _set_generators({name: t.clone() for name, t in state.items()}, runtime)
    assert (random.gauss(0, 1), np.random.rand(), torch.rand(2).tolist()) == drawn


def test_a_job_that_is_refused_leaves_nothing(tmp_path):
    job = make_job(tmp_path, distributed={"num_processes": 4096})
    with pytest.raises(SettingsError, match=r"num_processes=4096.*set it to at most"):
        run_job(job)
    assert not job.work_folder.exists()
    assert not job.metrics_file.exists()


def test_what_makes_a_training_the_same_training(tmp_path):
    """A new setting has to be added here or to the execution settings."""
    from flatout.engine.train.setup.identity import identity

    names = {
        name
        for name in identity(make_job(tmp_path))
        if not name.startswith("model.config.")
    }
    assert names == {
        "label_names",
        "model.crop_area",
        "model.flip_probability",
        "model.label_threshold",
        "model.lora.alpha",
        "model.lora.dropout",
        "model.lora.rank",
        "model.lora.targets",
        "model.lora.use_dora",
        "model.mask_probability",
        "model.matryoshka",
        "model.name_or_path",
        "model.overrides",
        "model.pooling",
        "model.revision",
        "model.task",
        "model.temperature",
        "runtime.precision",
        "runtime.residual",
        "runtime.seed",
        "token rows",
        "tokenize.max_length",
        "train rows",
        "train.adam_beta1",
        "train.adam_beta2",
        "train.adam_epsilon",
        "train.class_weights",
        "train.compute_metrics",
        "train.decay_fraction",
        "train.early_stopping_patience",
        "train.epochs",
        "train.focal_gamma",
        "train.freeze",
        "train.global_batch_size",
        "train.greater_is_better",
        "train.label_smoothing",
        "train.learning_rate",
        "train.learning_rate_at_batch",
        "train.max_grad_norm",
        "train.max_steps",
        "train.metric",
        "train.min_learning_rate_share",
        "train.momentum",
        "train.optimizer",
        "train.optimizer_options",
        "train.rows",
        "train.schedule",
        "train.warmup_fraction",
        "train.weight_decay",
    }


def test_a_point_of_a_warm_up_is_not_completed_after_later_steps(tmp_path):
    """Step 8 was logged without a rate, then step 12. After a resume, step 8 has a
    rate, which used to be written after step 12, so that the next resume repeated step
    12."""
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    first.start(0)
    first.write(8, {"train_loss": 1.5})
    first.write(8, {"validation_loss": 1.4})
    first.write(12, {"train_loss": 1.25, "train_samples_per_second": 9.0})
    before = path.read_text()
    for start_step in (5, 10):
        again = MetricsFile(path)
        again.start(start_step)
        again.write(8, {"train_loss": 1.5, "train_samples_per_second": 7.0})
        again.write(8, {"validation_loss": 1.4})
        again.write(12, {"train_loss": 1.25, "train_samples_per_second": 8.0})
        assert path.read_text() == before
    again.write(16, {"train_loss": 1.0})
    assert json.loads(path.read_text().splitlines()[-1])["step"] == 16


def planted(source, change):
    """Return the checkpoint of a crashed run with a changed and newly signed
    manifest."""
    folder = step_folders(source.work_folder)[0]
    facts = asdict(read_manifest(folder))
    change(facts, folder)
    (folder / "manifest.json").write_text(Manifest(**facts).text())
    return folder


def outward(facts, folder):
    (folder.parents[2] / "conf").mkdir()
    (folder.parents[2] / "conf" / "secret.yml").write_text("token: 1")
    facts["best"] = "../../conf"


def outward_file(facts, folder):
    facts["files"]["../../metrics.jsonl"] = [0, ""]


def outward_link(facts, folder):
    secret = folder.parents[2] / "secret"
    secret.write_text("token: 1")
    (folder.parent / facts["best"] / "notes").symlink_to(secret)


def unlisted(facts, folder):
    (folder / "more.safetensors").write_bytes(b"x")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (outward, r"manifest\.json is refused: best: '\.\./\.\./conf'"),
        (outward_file, r"manifest\.json is refused: files: '\.\./\.\./metrics"),
        (outward_link, r"best-\d+ is refused: file: 'notes'"),
        (unlisted, r"more\.safetensors is not in manifest"),
    ],
)
def test_a_checkpoint_from_elsewhere_leads_nowhere(
    tmp_path, change, text, crashed_at_9
):
    named = planted(crashed_at_9, change)
    job = make_job(tmp_path / "b", evaluate_every=3, resume=str(named), **EVERY_2)
    with pytest.raises(CheckpointError, match=text):
        run_job(job)
    names = [path.name for path in (tmp_path / "b").rglob("*")]
    assert not {"secret.yml", "notes", "conf"} & set(names)


def test_a_result_that_names_another_folder_is_refused(tmp_path):
    job = make_job(tmp_path)
    collect(job)
    path = job.work_folder / "result.json"
    fields = {**json.loads(path.read_text()), "model_folder": "../../conf"}
    path.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"result\.json is refused: model_folder"):
        collect(job)


def test_the_first_checkpoint_by_the_clock_comes_after_a_minute(tmp_path, monkeypatch):
    """A step takes 31 s on a simulated clock, with 15 minutes between checkpoints."""
    from flatout.engine.train.keeping import session

    job = make_job(tmp_path, checkpoint={"every_minutes": 15})
    clock = itertools.count(0, 31)
    stepped = session.Session.step_done
    monkeypatch.setattr(session.time, "monotonic", lambda: session.now_s)
    monkeypatch.setattr(session, "now_s", 0.0, raising=False)

    def step_done(self, done):
        session.now_s = float(next(clock))
        stepped(self, done)

    monkeypatch.setattr(session.Session, "step_done", step_done)
    crashed(job, "step 9/12  loss")
    assert [read_manifest(path).step for path in step_folders(job.work_folder)] == [3]


def test_points_wait_until_a_full_disk_has_room(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    file = MetricsFile(path)
    for step in (1, 2, 3):
        file.write(step, {"train_loss": 1.5})
    assert caplog.text.count("metrics.jsonl cannot be written now") == 1
    path.unlink()
    file.write(4, {"train_loss": 1.25})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["metrics"]) for line in lines] == [
        *((step, {"train_loss": 1.5}) for step in (1, 2, 3)),
        (4, {"train_loss": 1.25}),
    ]


def test_a_resume_in_fp16_goes_on_with_its_loss_scale(tmp_path, monkeypatch):
    half = replace(CPU, precision="fp16")
    step, scales = Stepper.__call__, {}

    def noted(self, batch):
        step(self, batch)
        scales[batch.step] = self.scaler.scale.item()

    monkeypatch.setattr(Stepper, "__call__", noted)
    monkeypatch.setattr(_LossScale, "GROWTH_INTERVAL", 5)
    options = {"config": NO_DROPOUT, "log_every": 1, **EVERY_2}
    jobs = [make_job(tmp_path / name, **options) for name in ("a", "b")]
    whole = train(jobs[0], half)
    expected = dict(scales)
    assert [expected[step] for step in (3, 4, 8, 9)] == [2**16, 2**17, 2**17, 2**18]
    with pytest.raises(Crash), when_logged("step 9/12  loss", crash):
        train(jobs[1], half)
    resumed = train(jobs[1], half)
    assert 4 <= resumed.report.resumed_from_step <= 8  # one waits, one is written
    assert curve(resumed) == curve(whole)
    assert scales == expected


def test_the_same_training_again_is_given_what_there_is(tmp_path, caplog):
    caplog.set_level("INFO")
    job = make_job(tmp_path, **EVERY_2)
    first = collect(job)
    finish(job.work_folder)
    files = {p: p.stat().st_mtime_ns for p in job.work_folder.glob("*/*")}
    caplog.clear()
    faster = make_job(tmp_path, batching="grouped", **EVERY_2)  # only affects execution
    again = collect(faster)
    assert again.report == first.report and curve(again) == curve(first)
    assert "this training run has already finished" in caplog.text
    assert "train.resume: never" in caplog.text
    assert {p: p.stat().st_mtime_ns for p in files} == files
    assert not was_trained_now(job.work_folder)
    finish(job.work_folder)  # at the end of every run of the pipeline
    assert collect(job).report == first.report


def again_never(job):
    return make_job(job.work_folder.parent, resume="never", **EVERY_2)


def after_a_crash(job):
    crashed(again_never(job), "step 9/12  loss")
    return job


def after_another(job):
    other = make_job(job.work_folder.parent, learning_rate=0.5, **EVERY_2)
    collect(other)
    finish(job.work_folder)
    return job


def after_damage(job):
    (path,) = job.work_folder.glob("best-*/model.safetensors")
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)
    return job


def after_loss(job):
    shutil.rmtree(job.work_folder / "last")
    return job


def after_half_a_line(job):
    (job.work_folder / "finished.json").write_text('{"identity": {')
    return job


def of_another_version(job):
    path = job.work_folder / "finished.json"
    fields = json.loads(path.read_text())
    fields["identity"]["flatout"] = "0.0.9"
    path.write_text(json.dumps(fields))
    return job


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished training run and its result."""
    job = make_job(tmp_path_factory.mktemp("finished"), **EVERY_2)
    first = collect(job)
    finish(job.work_folder)
    return job.work_folder.parent, first


@pytest.mark.parametrize(
    "change",
    [
        again_never,
        after_a_crash,
        after_another,
        after_damage,
        after_loss,
        after_half_a_line,
        of_another_version,
    ],
)
def test_what_is_not_there_whole_is_trained_again(tmp_path, change, finished):
    folder, first = finished
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    job = make_job(tmp_path, **EVERY_2)
    again = collect(change(job))
    assert was_trained_now(job.work_folder)
    assert again.report.train_wall_s != first.report.train_wall_s
    assert weights(again) == weights(first)


def test_the_best_model_of_other_evaluations_is_another_result(tmp_path):
    few = {"max_steps": 4}
    expected = run_job(make_job(tmp_path / "often", evaluate_every=1, **few))
    first = collect(make_job(tmp_path, **few))
    again = collect(make_job(tmp_path, evaluate_every=1, **few))
    assert again.report.train_wall_s != first.report.train_wall_s
    assert again.report.validation_loss == expected.report.validation_loss
    assert again.model_folder.name == expected.model_folder.name
    assert weights(again) == weights(expected)


def test_an_audit_of_a_finished_training_trains_again(tmp_path):
    first = collect(make_job(tmp_path))
    audited = make_job(tmp_path, audit=True)
    assert load_finished_result(audited) is None
    assert weights(collect(audited)) == weights(first)
    assert audited.metrics_file.with_name("suspect_rows.parquet").is_file()
    assert load_finished_result(audited) is not None


def test_several_machines_do_not_disagree_on_a_finished_training(tmp_path, caplog):
    several = {"num_machines": 2, "rendezvous_endpoint": "node0:29500"}
    job = make_job(tmp_path)
    collect(job)
    for ended in (lambda _: None, finish):  # before and after it is taken
        ended(job.work_folder)
        assert load_finished_result(make_job(tmp_path, distributed=several)) is None
        assert "the other machines do not have it" in caplog.messages[-1]
        assert load_finished_result(job) is not None


def test_folders_beside_the_files_of_a_model_end_no_training(tmp_path, crashed_at_9):
    """Some models save more than files, and the best model may be in another folder."""
    job = crashed_at_9
    (best,) = job.work_folder.glob("best-*")
    (best / "assets").mkdir()
    named = str(step_folders(job.work_folder)[0])
    again = make_job(tmp_path / "b", evaluate_every=3, resume=named, **EVERY_2)
    result = collect(again)
    for folder in (result.model_folder, result.last_model_folder):
        (folder / "assets").mkdir(exist_ok=True)
    write_result(again, result)
    assert weights(
        load_finished_result(make_job(tmp_path / "b", evaluate_every=3, **EVERY_2))
    )


def test_a_best_model_that_cannot_be_copied_is_an_error_of_all_ranks(
    tmp_path, crashed_at_9
):
    job = crashed_at_9
    (best,) = job.work_folder.glob("best-*")
    (best / "lost").symlink_to(best / "gone")
    named = str(step_folders(job.work_folder)[0])
    again = make_job(tmp_path / "b", evaluate_every=3, resume=named)
    with pytest.raises(CheckpointError, match=r"run cannot be prepared .*lost"):
        run_job(again)
