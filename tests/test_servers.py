"""`make ui` and `make viz` as a new user runs them: they start, show the expected
content in a real headless browser, and end completely."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from flatout import tracking
from flatout.pipeline_registry import DEFAULT
from flatout.tracking.follow import follow
from flatout.tracking.record import Sent
from tests import warm
from tests.browser import CHROMIUM, Browser
from tests.conftest import PROJECT
from tests.servers import end_all, free_port, listening, of_session, wait_for

REQUIRED = os.environ.get("FLATOUT_TESTS_BROWSER") == "required"
pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.slow]
MAKE = ("make", "-o", ".venv/runtime", "-o", ".venv/dev")
"""Run make with the installed packages as they are."""
QUICKER = {"MLFLOW_WORKERS": "1", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
"""Settings for MLflow's server, whose four workers and job queue take seconds to
start."""
METRIC = "train_samples_per_second"
SHOWN = """(() => {
  const text = document.body.innerText
  return %s.every(name => text.includes(name))
})()"""
CHART = """(() => [...document.querySelectorAll(".js-plotly-plot")].some(plot => {
  const marks = plot.querySelectorAll(".scatterlayer .trace, .barlayer .trace")
  let card = plot
  while (card && !card.innerText.includes("%s")) card = card.parentElement
  const charts = card ? card.querySelectorAll(".js-plotly-plot") : []
  return marks.length > 0 && charts.length === 1
}))()"""
"""Returns whether the card with this title has exactly one plot with drawn points."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser | None]:
    """Yield None if there is no Chromium and none is required. No page is opened
    then."""
    assert CHROMIUM or not REQUIRED, "FLATOUT_TESTS_BROWSER=required: install chromium"
    browser = Browser(tmp_path_factory.mktemp("profile")) if CHROMIUM else None
    yield browser
    if browser:
        browser.close()


def shows(browser: Browser, *texts: str) -> bool:
    return browser.shows(SHOWN % json.dumps(texts))


def text(browser: Browser) -> str:
    return browser.value("document.body.innerText")


class Made(NamedTuple):
    """The server that a make target starts."""

    process: subprocess.Popen[bytes]
    address: str
    log: Path

    def answer(self, path: str) -> bytes:
        return wait_for(self.address + path, self.process, self.log)

    def end(self, stop: Callable[[int, int], None], signum: int) -> None:
        """Stop the server. Ctrl-C reaches every process, but make passes SIGTERM only
        to kedro."""
        port = int(self.address.rpartition(":")[2])
        assert listening(self.process.pid) == {("127.0.0.1", port)}
        others = psutil.Process(self.process.pid).children(recursive=True)
        stop(self.process.pid, signum)
        self.process.wait(60)
        for one in {*of_session(self.process.pid), *others}:
            one.wait(60)


@contextmanager
def made(target: str, folder: Path, **variables: str) -> Iterator[Made]:
    """Run `make TARGET` in a shell in which no environment is activated."""
    port, log = free_port(), folder / "log"
    own = f"BIN={Path(sys.executable).parent}"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*MAKE, own, target, f"PORT={port}"],
            cwd=PROJECT,
            env={**warm.not_activated(), "BROWSER": "true", **variables},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield Made(process, f"http://127.0.0.1:{port}", log)
    finally:
        end_all(process.pid)


def test_mlflow_shows_the_run_and_its_rate(browser, store: str, tmp_path: Path):
    record = tracking.RunRecord(
        tracking_uri=store,
        experiment="flatout",
        name="reviews_bert-2x32_lr1e-3",
        artifact_location=str(tmp_path / "artifacts"),
    )
    points = tmp_path / "train_metrics.jsonl"
    record.points = str(points)
    folder = tracking.begin(tmp_path / "tracking", record, goes_on=False)
    lines = (
        {"step": step, "time_s": time.time(), "metrics": {METRIC: 9}}
        for step in range(1, 5)
    )
    points.write_text("".join(json.dumps(line) + "\n" for line in lines))
    record.figures["samples_per_s"] = 1234.5
    folder.end("FINISHED")
    follow(folder.path)
    run_id = Sent.load(folder.path, store).run_id

    with made("ui", tmp_path, MLFLOW_TRACKING_URI=store, **QUICKER) as server:
        assert server.answer("/health") == b"OK"
        assert f"Runs: {server.address}" in server.log.read_text()
        if browser:
            browser.open(f"{server.address}/#/experiments/1/runs")
            assert shows(browser, record.name), text(browser)
            run = f"{server.address}/#/experiments/1/runs/{run_id}"
            browser.open(run)
            assert shows(browser, "samples_per_s", "1,234"), text(browser)
            browser.open(f"{run}/model-metrics")
            assert browser.shows(CHART % METRIC), text(browser)
        server.end(os.kill, signal.SIGTERM)


PIPELINES = {
    "split": ("split_rows",),
    "tokenize": ("make_tokenizer", "encode_rows"),
    "train": ("train_model",),
    "evaluate": ("predict_split", "judge_predictions"),
    "benchmark": ("run_trials", "write_tuned"),
}


def test_kedro_viz_shows_each_pipeline(browser, tmp_path: Path):
    with made("viz", tmp_path) as server:
        assert b"train_model" in server.answer("/api/main")
        if browser:
            check_pipelines(browser, server.address)
        server.end(os.killpg, signal.SIGINT)


def check_pipelines(browser: Browser, address: str) -> None:
    every = {node for found in PIPELINES.values() for node in found}
    browser.open(f"{address}/?pid=__default__")
    assert shows(browser, *DEFAULT), text(browser)
    assert not any(browser.value(SHOWN % json.dumps([n])) for n in every)
    for name, nodes in PIPELINES.items():
        browser.open(f"{address}/?pid={name}&expandAllPipelines=true")
        assert shows(browser, *nodes), text(browser)
        others = every - {*nodes}
        assert not any(browser.value(SHOWN % json.dumps([n])) for n in others)
