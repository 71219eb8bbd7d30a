"""Files are complete or absent, even if renaming fails or a writer is killed."""

import os
import signal

import pytest
from kedro.io import DatasetError

from flatout.datasets.transformers_model import TransformersModel
from flatout.engine.files.atomic_write import (
    child,
    clear_leftovers,
    write_folder,
)
from flatout.engine.files.content_key import ContentKey
from flatout.engine.files.keyed_folder import is_current, write_whole

OLD, NEW = ContentKey({"text": "old"}), ContentKey({"text": "new"})


class Model:
    """A model with only the part of `save_pretrained` that is needed."""

    def __init__(self, text):
        self.text = text

    def save_pretrained(self, folder):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(self.text)


def write_tokens(folder, key):
    def fill(target):
        (target / "config.json").write_text(key.fields["text"])
        return {}

    write_whole(folder, key, fill)


def write_saved_model(folder, key):
    write_folder(folder, lambda t: (t / "config.json").write_text(key.fields["text"]))


def save_model(folder, key):
    TransformersModel(filepath=str(folder)).save(Model(key.fields["text"]))


WRITERS = [write_tokens, write_saved_model, save_model]


@pytest.mark.parametrize("write", WRITERS)
def test_where_the_last_rename_fails_the_old_folder_is_there(
    tmp_path, monkeypatch, write
):
    folder, real = tmp_path / "kept", os.rename
    write(folder, OLD)

    def fails(source, target):
        if os.fspath(target) == str(folder) and ".writing-" in os.fspath(source):
            raise PermissionError(13, "Permission denied")
        real(source, target)

    for module in ("rename", "replace"):
        monkeypatch.setattr(os, module, fails)
    with pytest.raises((OSError, DatasetError)):
        write(folder, NEW)
    assert (folder / "config.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def run_killed(write, folder):
    """Kill the process after it has moved the old folder away."""
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        return
    real = os.rename

    def killed(source, target):
        real(source, target)
        os.kill(os.getpid(), signal.SIGKILL)

    os.rename = os.replace = killed
    try:
        write(folder, NEW)
    finally:
        os._exit(1)


@pytest.mark.process
def test_a_folder_between_two_renames_comes_back_and_leftovers_go(tmp_path, caplog):
    caplog.set_level("INFO")
    folder = tmp_path / "kept"
    write_saved_model(folder, OLD)
    run_killed(write_saved_model, folder)
    assert not folder.exists() and len(list(tmp_path.iterdir())) == 2
    (half,) = tmp_path.glob(".kept.writing-*")  # its writer's death is not known yet
    clear_leftovers(tmp_path)
    assert (folder / "config.json").read_text() == "old"
    assert sorted(tmp_path.iterdir()) == sorted([folder, half])
    assert len(caplog.messages) == 1
    assert "removed unfinished files of killed runs: kept" in caplog.text


def test_leftovers_go_when_nothing_was_written_for_a_day(tmp_path):
    earlier = "pod-7~12~1700000000~ab"  # the name in version 0.1
    for name in ("fresh", "old", "long"):
        (tmp_path / f".{name}.writing-{earlier}").mkdir()
    (tmp_path / f".long.writing-{earlier}" / "rows").touch()  # still written to
    for name in ("old", "long"):
        os.utime(tmp_path / f".{name}.writing-{earlier}", (0, 0))
    clear_leftovers(tmp_path)
    found = sorted(path.name.partition(".writing")[0] for path in tmp_path.iterdir())
    assert found == [".fresh", ".long"]
    clear_leftovers(tmp_path, alone=True)  # with the lock of the folder
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\\b", "link", 3, None]
)
def test_names_that_lead_out_of_a_folder_are_refused(tmp_path, name):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="is not the name of something in"):
        child(folder, name)
    assert child(folder, "best-1") == folder / "best-1"


def test_a_key_file_that_names_files_elsewhere_describes_nothing(tmp_path):
    folder = tmp_path / "tokens"
    write_tokens(folder, OLD)
    assert is_current(folder, OLD)
    key_file = folder / "flatout_key.json"
    key_file.write_text(key_file.read_text().replace("config", "../tokens/config"))
    assert not is_current(folder, OLD)
