"""Names of checkpoints: which of them are paths, and what an unreachable Hub costs."""

from http.server import BaseHTTPRequestHandler
from typing import ClassVar

import pytest

from flatout.engine.machine.hub import missing_folder
from flatout.engine.models.model_keys import check_model_keys
from flatout.engine.parameters import ModelSettings, SettingsError
from tests.conftest import kedro
from tests.servers import serving

LOAD = """
from flatout.engine.parameters import ModelSettings
from flatout.engine.tokenizing.tokenizer import TokenizerError, _load
try:
    _load(ModelSettings(name_or_path="nobody/has-this"))
except TokenizerError as error:
    print(error)
"""


class HasNothing(BaseHTTPRequestHandler):
    """A Hub that responds but has no repositories."""

    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.asked.append(self.path)
        self.send_error(404)

    do_GET = do_HEAD

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.process
def test_a_hub_that_is_away_is_asked_once(tmp_path):
    own = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    HasNothing.asked.clear()
    with serving(HasNothing) as hub:
        there = kedro("-c", LOAD, HF_ENDPOINT=hub, **own).stdout
    assert f"it was looked for in the cache {tmp_path}/hub and there. Set" in there
    assert any(path.startswith("/nobody/has-this/") for path in HasNothing.asked)
    away = kedro("-c", LOAD, HF_ENDPOINT="http://127.0.0.1:9", **own).stdout
    assert "nobody/has-this" in away
    assert "and not there: it cannot be reached from here" in away
    assert "Retrying" not in away


@pytest.mark.parametrize(
    "name",
    ["/no/model", "./model", "../no", "~/model", "model/", "a/b/c", r"C:\model"],
)
def test_a_path_without_a_folder_is_refused_and_never_looked_for_elsewhere(name):
    with pytest.raises(SettingsError, match="name_or_path: there is no folder /"):
        check_model_keys(ModelSettings(name_or_path=name))


@pytest.mark.parametrize("name", ["models/mine", "bert-base-uncased", None])
def test_what_may_be_a_name_on_the_hub_is_looked_for_there(name):
    assert missing_folder(name) is None


def test_a_folder_that_is_there_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    assert missing_folder("./model") is None
