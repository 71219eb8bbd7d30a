"""Whole or absent, and what is there stays: failing renames, killed writers, names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kedro.io import DatasetError

from flatout.datasets import KeyedJSONDataset
from flatout.datasets.transformers_model import TransformersModel
from flatout.engine.files.atomic_folder import is_current, write_whole
from flatout.engine.files.atomic_write import (
    child,
    clear_leftovers,
    hidden_path,
    write_folder,
)
from flatout.engine.files.content_key import ContentKey
from tests.conftest import PROJECT

OLD, NEW = ContentKey({"text": "old"}), ContentKey({"text": "new"})


class Model:
    """Of `save_pretrained` no more than is needed."""

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


KILLED = """
import os, sys
from pathlib import Path
{setup}
real = os.rename
def killed(source, target):
    real(source, target)
    os.kill(os.getpid(), 9)
os.rename = killed
os.replace = killed
from tests.engine.test_in_place import {write}, NEW
{write}(Path(sys.argv[1]), NEW)
"""


def run_killed(write, folder, setup=""):
    """The process dies behind its first rename: the old folder has made room."""
    code = KILLED.format(write=write.__name__, setup=setup)
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, cwd=PROJECT, timeout=60, check=False)
    assert done.returncode == -9


@pytest.mark.process
def test_a_folder_between_two_renames_comes_back_and_leftovers_go(tmp_path, caplog):
    caplog.set_level("INFO")
    folder = tmp_path / "kept"
    write_saved_model(folder, OLD)
    run_killed(write_saved_model, folder)
    assert not folder.exists() and len(list(tmp_path.iterdir())) == 2
    living = hidden_path(tmp_path / "other")
    living.mkdir()
    clear_leftovers(tmp_path)
    assert (folder / "config.json").read_text() == "old"
    assert sorted(tmp_path.iterdir()) == sorted([folder, living])
    assert len(caplog.messages) == 1
    assert "removed what killed runs left of kept" in caplog.text


def test_leftovers_of_other_machines_go_when_nothing_was_written_for_a_day(tmp_path):
    mark = "pod-7~12~1700000000~ab"
    for name in ("fresh", "old"):
        (tmp_path / f".{name}.writing-{mark}").mkdir()
    os.utime(tmp_path / f".old.writing-{mark}", (0, 0))
    clear_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f".fresh.writing-{mark}"]
    clear_leftovers(tmp_path, alone=True)  # with the lock on the folder
    assert list(tmp_path.iterdir()) == []


def other_namespace(*command):
    """Runs where process numbers are those of a container of this machine's name."""
    flags = ("--user", "--map-root-user", "--pid", "--fork", "--mount-proc")
    return ["unshare", *flags, *command]


def has_namespaces() -> bool:
    if shutil.which("unshare") is None:
        return False
    made = subprocess.run(other_namespace("true"), check=False, capture_output=True)
    return made.returncode == 0


SWEEP = "import sys; from pathlib import Path; from flatout.engine.files.atomic_write "
SWEEP += "import clear_leftovers; clear_leftovers(Path(sys.argv[1]))"


@pytest.mark.skipif(not has_namespaces(), reason="namespaces are not allowed here")
def test_a_container_does_not_remove_what_its_neighbour_writes(tmp_path):
    """It has the same name, and no process of the number in its own namespace."""
    living = hidden_path(tmp_path / "model")
    living.mkdir()
    command = other_namespace(sys.executable, "-c", SWEEP, str(tmp_path))
    subprocess.run(command, cwd=PROJECT, timeout=60, check=True)
    assert list(tmp_path.iterdir()) == [living]
    dead = living.with_name(living.name.replace(f"~{os.getpid()}~", "~4194305~"))
    living.rename(dead)  # no process has a number so large
    clear_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("hidden", [PermissionError, FileNotFoundError])
def test_a_process_that_cannot_be_asked_about_lives(tmp_path, monkeypatch, hidden):
    """Another user's, and one that /proc hides."""
    living = hidden_path(tmp_path / "model")
    living.mkdir()

    def fails(*_, **__):
        raise hidden

    monkeypatch.setattr(Path, "read_text", fails)
    clear_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [living]
    os.utime(living, (0, 0))  # for a day nothing was written
    clear_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_number_of_a_dead_process_given_to_another_protects_nothing(tmp_path):
    here = hidden_path(tmp_path / "model")
    start = here.name.split("~")[-2]
    later = here.with_name(here.name.replace(f"~{start}~", f"~{int(start) - 60}~"))
    for path in (here, later):
        path.mkdir()
    dataset = KeyedJSONDataset(filepath=str(tmp_path / "report.json"))

    class Report:
        key = OLD

        @staticmethod
        def value():
            return {"rows": 1}

    dataset.save(Report)
    assert sorted(tmp_path.iterdir()) == sorted([here, tmp_path / "report.json"])


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
