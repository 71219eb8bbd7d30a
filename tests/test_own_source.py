"""A model that is trained from the folder to which it would be saved."""

from pathlib import Path

import pytest

from flatout.engine.parameters import SettingsError
from flatout.project.data.outputs import check_source


def test_a_model_is_not_written_over_by_what_begins_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "models")
    written = [tmp_path / "models/model", tmp_path / "models/last_model"]
    for name in ("models/model", "link/../models/last_model", str(written[0])):
        with pytest.raises(SettingsError, match=r"would overwrite: copy it \(cp -r"):
            check_source(name, written)
    for name in (None, "models/before", "org/model"):
        check_source(name, written)
    check_source("models/model", [Path("other/model")])
