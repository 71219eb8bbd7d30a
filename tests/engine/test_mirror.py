"""Checkpoints in an object store, from which a machine with an empty disk resumes."""

import itertools
import logging
import os
import random
import shutil
import signal
import time
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest

from flatout.engine.checkpoints import checkpoint_mirror
from flatout.engine.checkpoints.checkpoint_folder import (
    MANIFEST,
    CheckpointError,
    step_folders,
)
from flatout.engine.checkpoints.checkpoint_mirror import OWNER
from flatout.engine.files import mirror as store
from flatout.engine.files.arrow_folder import write_recipe
from flatout.engine.files.content_key import file_hash
from flatout.engine.files.keyed_folder import stored_facts
from flatout.engine.files.mirror import COMPLETE, Mirror, MirrorError
from flatout.engine.launch.launch import run_job
from flatout.engine.machine.signals import Interrupted
from tests.engine.runs import (
    crashed,
    curve,
    make_job,
    run_forked,
    weights,
    when_logged,
)
from tests.make import TableRecipe

LONG = 30
"""Epochs of the training run that is killed 20 times."""
EVERY_2 = {"every_steps": 2, "keep": 2}
AWS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
}
REFUSED = (MirrorError, CheckpointError)
numbers = itertools.count()


@pytest.fixture(scope="module")
def server():
    """An S3 server in this process."""
    moto = pytest.importorskip("moto.server")
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    yield "http://{}:{}".format(*running.get_host_and_port())
    running.stop()


@pytest.fixture
def bucket(server, monkeypatch):
    for name, value in {**AWS, "AWS_ENDPOINT_URL": server}.items():
        monkeypatch.setenv(name, value)
    import boto3

    name = f"bucket{next(numbers)}"
    boto3.client("s3").create_bucket(Bucket=name)
    yield name
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/the mirror"


@pytest.fixture(scope="module")
def lost(tmp_path_factory):
    """The folder of a machine that was lost after step 9, with its mirror."""
    folder = tmp_path_factory.mktemp("lost")
    crashed(job_of(folder / "a", f"file://{folder}/the mirror"), "step 9/12  loss")
    return folder


@pytest.fixture
def left(lost, tmp_path, url):
    """The URL of the mirror of the lost machine."""
    shutil.copytree(lost / "the mirror", tmp_path / "the mirror")
    return url


def job_of(folder: Path, url: str | None, **train):
    checkpoint = {**EVERY_2, "mirror": url}
    return make_job(folder, evaluate_every=3, checkpoint=checkpoint, **train)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    result = run_job(job_of(tmp_path_factory.mktemp("undisturbed"), None))
    return curve(result), weights(result)


def steps_in(url: str) -> list[int]:
    return [int(name[-9:]) for name in steps(url)]


def steps(url: str) -> list[str]:
    return [
        name
        for name, complete in Mirror(url, "").copies().items()
        if complete and name.startswith("step")
    ]


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_a_new_machine_goes_on_from_the_mirror(tmp_path, kind, undisturbed, request):
    url = request.getfixturevalue("url")
    if kind == "s3":
        url = f"s3://{request.getfixturevalue('bucket')}/a run"
    crashed(job_of(tmp_path / "a", url), "step 9/12  loss")
    newest = steps_in(url)[-1]
    result = run_job(job_of(tmp_path / "b", url))
    assert result.report.resumed_from_step == newest > 0
    assert (curve(result), weights(result)) == undisturbed
    assert len(steps(url)) <= EVERY_2["keep"]
    assert all(Mirror(url, "").copies().values())
    assert not list((tmp_path / "b" / "run").glob(".mirror*"))


def test_a_newer_checkpoint_here_is_kept(tmp_path, lost, left):
    shutil.copytree(lost / "a", tmp_path / "a")
    job = job_of(tmp_path / "a", left)
    Mirror(left, "").remove(steps(left)[-1])
    newest = step_folders(job.work_folder)[0].name
    assert run_job(job).report.resumed_from_step == int(newest[-9:])


def unfinished(files, copy: str) -> None:
    files.rm(f"{copy}/{COMPLETE}")


def changed(files, copy: str) -> None:
    name = f"{copy}/optimizer.safetensors"
    data = bytearray(files.cat_file(name))
    data[-1] ^= 1
    files.pipe_file(name, bytes(data))


def without_a_file(files, copy: str) -> None:
    files.rm(f"{copy}/state.json")


def empty_list(files, copy: str) -> None:
    files.pipe_file(f"{copy}/{COMPLETE}", b"")


def half_a_list(files, copy: str) -> None:
    files.pipe_file(f"{copy}/{COMPLETE}", files.cat_file(f"{copy}/{COMPLETE}")[:40])


def half_a_manifest(files, copy: str) -> None:
    files.pipe_file(f"{copy}/{MANIFEST}", files.cat_file(f"{copy}/{MANIFEST}")[:40])
    files.pipe_file(f"{copy.rpartition('/')[0]}/{OWNER}", b'{"run": ')  # without owner


HARMS = (unfinished, changed, without_a_file, empty_list, half_a_list, half_a_manifest)


@pytest.mark.parametrize("harm", HARMS)
def test_a_torn_upload_is_no_checkpoint(tmp_path, left, harm, undisturbed):
    older, newest = steps(left)
    files, root = fsspec.url_to_fs(left)
    harm(files, f"{root}/{newest}")
    result = run_job(job_of(tmp_path / "b", left))
    assert result.report.resumed_from_step == int(older[-9:])
    assert (curve(result), weights(result)) == undisturbed
    assert all(Mirror(left, "").copies().values())


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_the_mirror_of_another_training_is_refused(tmp_path, left, resume):
    before = Mirror(left, "").copies()
    other = job_of(tmp_path / "b", left, learning_rate=0.5, resume=resume)
    with pytest.raises(REFUSED, match=r"another training.*learning_rate"):
        run_job(other)
    assert Mirror(left, "").copies() == before


def test_a_longer_training_goes_on(tmp_path, left):
    longer = job_of(tmp_path / "b", left, epochs=4)
    newest = int(steps(left)[-1][-9:])
    assert run_job(longer).report.resumed_from_step == newest


def test_never_begins_anew_and_its_copies_replace_the_old_ones(tmp_path, left):
    crashed(job_of(tmp_path / "b", left, resume="never"), "step 6/12  loss")
    assert 0 < steps_in(left)[-1] < 6


def test_a_run_whose_mirror_was_taken_over_trains_on(tmp_path, url, caplog):
    job = job_of(tmp_path / "a", url)
    with when_logged(
        "step 3/12  loss",
        lambda: Mirror(url, "").write(OWNER, '{"run": "x", "host": "far"}'),
    ):
        result = run_job(job)
    assert any("a run on far is using it" in text for text in result.report.warnings)


def failing(times: int, real=Mirror.upload):
    """Return a version of `Mirror.upload` that fails `times` times."""
    left = [times]

    def upload(self, *arguments):
        left[0] -= 1
        if left[0] >= 0:
            raise ConnectionError("the bucket is gone")
        real(self, *arguments)

    return upload


@pytest.mark.parametrize(("times", "told"), [(2, False), (10**6, True)])
def test_a_store_that_is_gone_stops_no_training(
    tmp_path, url, monkeypatch, caplog, times, told
):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(Mirror, "upload", failing(times))
    monkeypatch.setattr(checkpoint_mirror, "END_S", 3.0 if times == 2 else 0.1)
    result = run_job(job_of(tmp_path, url))
    assert caplog.text.count("the bucket is gone); the training continues") == 1
    lacks = [text for text in result.report.warnings if "lacks the newest" in text]
    assert bool(lacks) == told
    assert bool(steps_in(url)) != told


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("s3://no-such-bucket/run", "NoSuchBucket|bucket does not exist"),
        ("odd://place/run", "odd"),
        ("s3://{bucket}/run", "NoCredentials"),
    ],
    ids=["no bucket", "no protocol", "no credentials"],
)
def test_a_mirror_that_cannot_be_used_is_refused_before_the_first_step(
    tmp_path, bucket, address, text, monkeypatch
):
    if "Credentials" in text:
        for name in AWS:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("HOME", str(tmp_path))
        fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(REFUSED, match=text) as error:
        run_job(job_of(tmp_path, address.format(bucket=bucket)))
    assert "credentials" in str(error.value)


def test_a_store_that_does_not_answer_is_tried_again(monkeypatch):
    monkeypatch.setattr(store.time, "sleep", lambda _: None)
    answers = iter([ConnectionError("gone"), ConnectionError("gone"), None])

    def work():
        if error := next(answers):
            raise error
        return "there"

    assert Mirror("file:///x", "train.checkpoint.mirror").with_retries(work) == "there"


def test_a_signal_ends_the_step_and_uploads(tmp_path, url, undisturbed):
    job = job_of(tmp_path / "a", url)
    tell = when_logged("step 9/12", lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match="also in the mirror") as stop, tell:
        run_job(job)
    assert stop.value.code == 143
    assert steps_in(url)[-1] == 9
    result = run_job(job_of(tmp_path / "b", url))
    assert result.report.resumed_from_step == 9
    assert weights(result) == undisturbed[1]


class Rows(TableRecipe):
    made = 0

    def batches(self):
        Rows.made += 1
        return super().batches()


def test_token_rows_are_downloaded_by_their_key(tmp_path, url, caplog):
    def recipe(text: str) -> Rows:
        made = Rows(pa.table({"text": [text] * 3}))
        object.__setattr__(made, "mirror", url)
        return made

    for machine, text in (("a", "one"), ("b", "one"), ("c", "two")):
        write_recipe(tmp_path / machine / "tokens", recipe(text))
        assert stored_facts(tmp_path / machine / "tokens")["rows"] == 3
    assert Rows.made == 2
    first, second, third = (
        {f.name: file_hash(f) for f in (tmp_path / machine / "tokens").iterdir()}
        for machine in "abc"
    )
    assert first == second != third
    (name,) = (n for n in Mirror(url, "").copies() if recipe("one").key.digest in n)
    Path(url.removeprefix("file://"), name, "dataset_info.json").write_text("{")
    write_recipe(tmp_path / "d" / "tokens", recipe("one"))
    assert "dataset_info.json is damaged" in caplog.text
    assert Rows.made == 3


@pytest.mark.process
def test_one_process_goes_on_from_the_mirror_of_two_ranks(tmp_path, url):
    options = {"schedule": "constant", "distributed": {"num_processes": 2}}
    run_forked(job_of(tmp_path / "a", url, max_steps=8, **options))
    newest = steps_in(url)[-1]
    result = run_job(job_of(tmp_path / "b", url, max_steps=12, schedule="constant"))
    assert result.report.resumed_from_step == newest > 0


def test_trials_and_gates_have_no_mirror(tmp_path, url):
    job = job_of(tmp_path, url).in_folder(tmp_path / "trial")
    assert job.settings.train.checkpoint.mirror is None
    assert job.work_folder == tmp_path / "trial"


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.process
def test_twenty_kills_at_random_moments_change_nothing(tmp_path, bucket):
    import boto3

    url, draw, bucket_of = f"s3://{bucket}/run", random.Random(48), boto3.client("s3")

    def owner() -> bytes:
        try:
            found = bucket_of.get_object(Bucket=bucket, Key=f"run/{OWNER}")
        except bucket_of.exceptions.NoSuchKey:
            return b""
        return found["Body"].read()

    newest = [0]
    for machine in range(20):
        before = owner()
        child = os.fork()
        if not child:
            run_job(job_of(tmp_path / f"machine-{machine}", url, epochs=LONG))
            os._exit(0)
        while owner() == before:
            time.sleep(0.05)
        time.sleep(draw.uniform(0, 6.0))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        newest.append(max(steps_in(url), default=0))
    print(newest)  # noqa: T201
    assert newest == sorted(newest)
    assert 0 < newest[-1]
    result = run_job(job_of(tmp_path / "last", url, epochs=LONG))
    assert result.report.resumed_from_step == newest[-1]
    undisturbed = run_job(job_of(tmp_path / "undisturbed", None, epochs=LONG))
    assert (curve(result), weights(result)) == (
        curve(undisturbed),
        weights(undisturbed),
    )
