"""Checkpoints are complete or absent, valid or skipped, and never end a run."""

import json
import pickle
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flatout.engine.checkpoints import checkpoint_folder as folders
from flatout.engine.checkpoints.checkpoint_folder import (
    CheckpointError,
    Manifest,
    newest_valid,
    open_checkpoint,
    prune,
    read_manifest,
    step_folders,
    write_checkpoint,
)
from flatout.engine.checkpoints.checkpoint_writer import CheckpointWriter
from flatout.engine.checkpoints.resume import check_identity
from flatout.engine.checkpoints.shards import whole_tensor
from flatout.engine.files import atomic_write
from flatout.engine.launch.launch import run_job
from flatout.engine.machine.runtime import set_up
from flatout.engine.train.keeping.snapshots import (
    MODEL,
    Snapshots,
    UnsoundStateError,
    named_tensors,
    restore,
)
from flatout.engine.train.recording.health import NonFiniteError
from flatout.engine.train.recording.recorder import Recorder
from flatout.engine.train.setup.assemble import assemble
from flatout.engine.train.setup.identity import identity
from tests.engine.runs import crashed, make_job

FILES = (
    "model.safetensors",
    "optimizer.safetensors",
    "ranks.safetensors",
    "state.json",
    "manifest.json",
)


def manifest(step: int, best: str | None = None) -> Manifest:
    return Manifest(step, 100, 1, {"train.epochs": 3}, best)


def fill(folder: Path) -> list[str]:
    for name in FILES[:-1]:
        (folder / name).write_bytes(name.encode() * 50)
    return list(FILES[:-1])


@pytest.fixture()
def trainer(tmp_path):
    job = make_job(tmp_path)
    trainer = assemble(job, set_up(job.settings.runtime))
    for step in range(2):
        trainer.stepper(trainer.data[step])
    return trainer


@pytest.mark.parametrize("change", [{"step": "3"}, {"files": ["a"]}])
def test_a_manifest_with_another_kind_of_value_is_refused(change):
    text = replace(manifest(3), **change).text()
    with pytest.raises(ValueError, match="must be an integer, `files` a table"):
        Manifest.parse(text)


def test_a_manifest_is_read_in_any_order_but_in_no_other_format():
    fields = json.loads(manifest(3).text())
    found = Manifest.parse(json.dumps(dict(sorted(fields.items()))))
    assert (found.step, found.identity) == (3, {"train.epochs": 3})
    with pytest.raises(ValueError, match="format 2; this version reads 1"):
        Manifest.parse(replace(manifest(3), format=2).text())


def test_what_is_written_is_read_back(tmp_path):
    written = write_checkpoint(tmp_path, manifest(7), fill)
    assert written.folder.name == "step-000000007"
    assert open_checkpoint(written.folder) == written
    assert sorted(written.manifest.files) == sorted(FILES[:-1])
    assert list(tmp_path.glob(".*")) == []


HARMS = ["cut in half", "one bit", "empty", "absent", "unreadable"]


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", FILES)
def test_any_harm_to_any_file_is_found_and_the_older_one_is_used(tmp_path, name, harm):
    older = write_checkpoint(tmp_path, manifest(3), fill)
    newer = write_checkpoint(tmp_path, manifest(4), fill)
    path = newer.folder / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(
        {"cut in half": data[: len(data) // 2], "one bit": data}.get(harm, b"")
    )
    if harm in ("absent", "unreadable"):
        path.unlink()
    if harm == "unreadable":  # a link to itself, so that every read raises an OSError
        path.symlink_to(path)
    found, faults = newest_valid(tmp_path)
    assert found == older
    assert len(faults) == 1 and name in faults[0]


def test_a_write_that_is_cut_short_leaves_what_was_there(tmp_path):
    before = write_checkpoint(tmp_path, manifest(3), fill)

    def fail(folder):
        fill(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        write_checkpoint(tmp_path, manifest(3), fail)
    assert newest_valid(tmp_path) == (before, [])
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000003"]


def test_the_name_comes_last(tmp_path, monkeypatch):
    """Nothing is a checkpoint before it is renamed, and the renaming is atomic."""
    seen = []
    real = atomic_write.replace_atomically

    def look(hidden, target):
        seen.append((step_folders(tmp_path), sorted(p.name for p in hidden.iterdir())))
        real(hidden, target)

    monkeypatch.setattr(atomic_write, "replace_atomically", look)
    write_checkpoint(tmp_path, manifest(3), fill)
    assert seen == [([], sorted(FILES))]


def test_the_newest_are_kept_and_the_best_models_they_name(tmp_path):
    for step in (2, 4, 6):
        (tmp_path / folders.best_folder(step)).mkdir()
    for step in (3, 5, 7, 8):
        best = folders.best_folder({3: 2, 5: 4, 7: 6, 8: 6}[step])
        write_checkpoint(tmp_path, manifest(step, best), fill)
    prune(tmp_path, 3, folders.best_folder(6))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        *("best-000000004", "best-000000006"),
        *("step-000000005", "step-000000007", "step-000000008"),
    ]


@pytest.mark.parametrize("end", [prune, folders.clear_all_leftovers])
def test_what_a_removal_that_was_cut_short_left_is_removed(tmp_path, end):
    (tmp_path / ".old-step-000000001-0").mkdir()
    (tmp_path / ".old-step-000000001-0" / "model.safetensors").write_bytes(b"half")
    (tmp_path / "mine.txt").write_text("kept")
    end(tmp_path, *([3, None] if end is prune else []))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_checkpoint_holds_no_pickle_and_reads_none(tmp_path):
    """A planted pickle does not match its hash, and no code would unpickle it."""
    job = make_job(tmp_path, checkpoint={"every_steps": 2})
    crashed(job, "step 6/12  loss")
    newest = step_folders(job.work_folder)[0]
    for path in newest.iterdir():
        if path.suffix == ".safetensors":
            assert load_file(path)
        else:
            assert json.loads(path.read_text())
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return Path.touch, (marker,)

    for name in FILES:
        (newest / name).write_bytes(pickle.dumps(Evil()))
        with pytest.raises(CheckpointError):
            open_checkpoint(newest)
    assert not marker.exists()


def test_a_snapshot_does_not_change_with_the_training(trainer):
    recorder = Recorder(trainer, 0.0)
    before = {n: t.detach().clone() for n, t in named_tensors(trainer.model).items()}
    snapshot = Snapshots(trainer, recorder).take()
    trainer.stepper(trainer.data[2])
    changed = named_tensors(trainer.model)
    assert any(not torch.equal(changed[name], before[name]) for name in before)
    assert all(
        torch.equal(snapshot.files[MODEL][name], before[name]) for name in before
    )


def test_all_state_comes_back(trainer, tmp_path):
    recorder = Recorder(trainer, 0.0)
    snapshot = Snapshots(trainer, recorder).take()
    saved = write_checkpoint(tmp_path, manifest(2), snapshot.write)
    for step in (2, 3):
        trainer.stepper(trainer.data[step])
    expected = {n: t.detach().clone() for n, t in named_tensors(trainer.model).items()}
    sums = float(trainer.stepper.sums.loss)
    other = assemble(trainer.job, trainer.runtime)
    assert restore(saved, other, Recorder(other, 0.0), None) == 2
    for step in (2, 3):
        other.stepper(other.data[step])
    found = named_tensors(other.model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert float(other.stepper.sums.loss) == sums


def test_weights_of_another_shape_are_refused_by_name(trainer, tmp_path):
    snapshot = Snapshots(trainer, Recorder(trainer, 0.0)).take()
    name = "model.classifier.weight"
    snapshot.files[MODEL][name] = torch.zeros(7, 16)
    saved = write_checkpoint(tmp_path, manifest(2), snapshot.write)
    with pytest.raises(CheckpointError, match=r"classifier\.weight: \(7, 16\) -> "):
        restore(saved, trainer, Recorder(trainer, 0.0), None)


def test_weights_that_are_not_finite_are_never_saved(trainer, tmp_path):
    snapshot = Snapshots(trainer, Recorder(trainer, 0.0)).take()
    snapshot.files[MODEL]["model.classifier.bias"][1] = float("nan")
    with pytest.raises(UnsoundStateError, match=r"classifier\.bias"):
        write_checkpoint(tmp_path, manifest(2), snapshot.write)
    assert list(tmp_path.glob("*step-*")) == []


def test_after_a_step_that_was_not_finite_nothing_is_saved(tmp_path):
    """The step is not applied and is detected at the next logging step. With a
    checkpoint before that, a later run would continue without this step."""
    job = make_job(
        tmp_path,
        learning_rate=1e30,
        schedule="constant",
        warmup_fraction=0.0,
        log_every=12,
        checkpoint={"every_steps": 1, "keep": 50},
    )
    with pytest.raises(NonFiniteError) as stopped:
        run_job(job)
    bad_step = int(str(stopped.value).split(":")[0].removeprefix("step "))
    steps = [read_manifest(path).step for path in step_folders(job.work_folder)]
    assert max(steps, default=0) <= bad_step
    for path in step_folders(job.work_folder):
        weights = load_file(path / "model.safetensors")
        assert all(bool(torch.isfinite(t).all()) for t in weights.values())


class SlowSnapshot:
    """Writes only when it is told to."""

    def __init__(self):
        self.go = threading.Event()

    def write(self, folder):
        self.go.wait(10)
        return fill(folder)


def test_the_writer_works_beside_the_training_and_one_at_a_time(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=2)
    first, second = SlowSnapshot(), SlowSnapshot()
    writer.start(first.write, manifest(1))
    assert writer.busy and step_folders(tmp_path) == []
    waiting = threading.Thread(target=writer.start, args=(second.write, manifest(2)))
    waiting.start()
    time.sleep(0.05)
    assert waiting.is_alive()  # two saves never overlap
    first.go.set()
    waiting.join(10)
    assert [path.name for path in step_folders(tmp_path)] == ["step-000000001"]
    second.go.set()
    writer.wait()
    assert writer.newest.manifest.step == 2
    assert writer.faults == []


def test_a_fault_of_the_writer_is_told_and_the_older_checkpoint_stays(tmp_path, caplog):
    def full(folder):
        fill(folder)
        raise RuntimeError("unexpected pos 64 vs 0")  # the message of torch

    writer = CheckpointWriter(tmp_path, keep=2)
    writer.start(fill, manifest(1))
    writer.start(full, manifest(2))
    writer.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]
    assert "step 2 was not saved (unexpected pos 64 vs 0)" in caplog.text
    assert len(writer.faults) == 1


def test_a_checkpoint_that_is_saved_is_not_called_lost(tmp_path, monkeypatch):
    """The folder of the surplus checkpoint is already gone when it should be
    removed."""
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.start(fill, manifest(1))
    writer.wait()
    absent = tmp_path / folders.step_folder(0)
    monkeypatch.setattr(folders, "step_folders", lambda _: [absent, absent])
    writer.start(fill, manifest(2))
    writer.wait()
    assert writer.newest.manifest.step == 2
    (fault,) = writer.faults
    assert "step 2 was saved, but older ones could not be removed" in fault


def test_a_full_disk_costs_checkpoints_and_no_run(tmp_path, monkeypatch):
    """Every write to the folder fails from step 4 to step 8."""
    from flatout.engine.checkpoints import checkpoint_writer

    real = checkpoint_writer.write_checkpoint

    def full(folder, facts, *rest):
        if 4 <= facts.step <= 8:
            raise OSError(28, "No space left on device")
        return real(folder, facts, *rest)

    monkeypatch.setattr(checkpoint_writer, "write_checkpoint", full)
    job = make_job(tmp_path, checkpoint={"every_steps": 2, "keep": 2})
    result = run_job(job)
    assert result.report.steps == 12
    told = [text for text in result.report.warnings if "No space left" in text]
    assert told and "the newest one is" in told[0]


def test_a_tensor_that_no_rank_shares_is_whole():
    tensor = torch.arange(3.0, requires_grad=True)
    found = whole_tensor(tensor)
    assert torch.equal(found, tensor) and not found.requires_grad


def test_a_stopped_run_may_be_made_longer_but_not_shorter(tmp_path, caplog):
    now = {**identity(make_job(tmp_path)), "train.max_steps": 20, "train.epochs": 3.0}
    manifest = Manifest(4, 12, 1, {**now, "train.max_steps": 12}, None)
    check_identity(tmp_path, manifest, now, log=False)
    assert not caplog.text  # passes the first of two checks, but not the second
    check_identity(tmp_path, manifest, now)
    assert "train.max_steps: 12 -> 20: training continues" in caplog.text
    with pytest.raises(CheckpointError, match=r"train\.max_steps: 12 -> 8"):
        check_identity(tmp_path, manifest, {**now, "train.max_steps": 8})
    with pytest.raises(CheckpointError, match=r"train\.epochs: 3\.0 -> 2\.0\. Set"):
        check_identity(tmp_path, manifest, {**now, "train.epochs": 2.0})


def test_a_setting_that_an_earlier_version_did_not_have_was_at_its_default(tmp_path):
    now = identity(make_job(tmp_path))
    earlier = {n: v for n, v in now.items() if n != "train.focal_gamma"}
    manifest = Manifest(4, 12, 1, earlier, None)
    check_identity(tmp_path, manifest, now)
    with pytest.raises(CheckpointError, match=r"focal_gamma: 0\.0 -> 2\.0"):
        check_identity(tmp_path, manifest, {**now, "train.focal_gamma": 2.0})
    unset = Manifest(4, 12, 1, {**now, "train.removed": None}, None)
    check_identity(tmp_path, unset, now)
    manifest = Manifest(4, 12, 1, {**now, "train.removed": 3}, None)
    with pytest.raises(CheckpointError, match=r"train\.removed: 3 -> 'absent'"):
        check_identity(tmp_path, manifest, now)


@pytest.mark.parametrize(
    ("name", "value", "use"),
    [
        ("model.config.preset", "small", "model.config.num_hidden_layers"),
        ("train.layer_decay", 0.9, "train.freeze"),
        ("train.optimizer", "muon", "train.optimizer=adamw"),
    ],
)
def test_a_removed_setting_is_named_with_its_replacement(tmp_path, name, value, use):
    now = identity(make_job(tmp_path))
    manifest = Manifest(4, 12, 1, {**now, name: value}, None)
    with pytest.raises(CheckpointError, match=r"or set train\.resume: never") as caught:
        check_identity(tmp_path, manifest, now)
    assert f"This version removed {name} (use {use}" in str(caught.value)
    assert "Set these back" not in str(caught.value)
