"""MLflow's and Kedro-Viz's pages in a real browser, headless."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flatout import tracking
from flatout.pipeline_registry import DEFAULT
from flatout.tracking.follow import follow
from flatout.tracking.record import Sent
from tests.browser import CHROMIUM, Browser
from tests.servers import QUICKER, served

REQUIRED = os.environ.get("FLATOUT_TESTS_BROWSER") == "required"
pytestmark = [
    pytest.mark.browser,
    pytest.mark.process,
    pytest.mark.skipif(not (CHROMIUM or REQUIRED), reason="needs chromium"),
]
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
"""Whether a plot with drawn points is the only one of the card with that title."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert CHROMIUM, "FLATOUT_TESTS_BROWSER=required: install chromium"
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def shows(browser: Browser, *texts: str) -> bool:
    return browser.shows(SHOWN % json.dumps(texts))


def text(browser: Browser) -> str:
    return browser.value("document.body.innerText")


def test_mlflow_shows_the_run_and_its_rate(
    browser: Browser, store: str, tmp_path: Path
):
    points = tmp_path / "train_metrics.jsonl"
    record = tracking.RunRecord(
        tracking_uri=store,
        experiment="flatout",
        name="reviews_bert-2x32_lr1e-3",
        artifact_location=str(tmp_path / "artifacts"),
    )
    record.points = str(points)
    folder = tracking.begin(tmp_path / "tracking", record, goes_on=False)
    lines = (
        {
            "step": step,
            "time_s": time.time(),
            "metrics": {"train_samples_per_second": 9},
        }
        for step in range(1, 5)
    )
    points.write_text("".join(json.dumps(line) + "\n" for line in lines))
    record.figures["samples_per_s"] = 1234.5
    folder.end("FINISHED")
    follow(folder.path)
    run_id = Sent.load(folder.path, store).run_id

    command, store_variable = ["flatout", "ui"], {"MLFLOW_TRACKING_URI": store}
    with served(command, tmp_path, "/health", **QUICKER, **store_variable) as address:
        browser.open(f"{address}/#/experiments/1/runs")
        assert shows(browser, record.name), text(browser)
        run = f"{address}/#/experiments/1/runs/{run_id}"
        browser.open(run)
        assert shows(browser, "samples_per_s", "1,234"), text(browser)
        browser.open(f"{run}/model-metrics")
        assert browser.shows(CHART % METRIC), text(browser)


PIPELINES = {
    "split": ("split_rows",),
    "tokenize": ("make_tokenizer", "encode_rows"),
    "train": ("train_model",),
    "evaluate": ("predict_split", "judge_predictions"),
    "benchmark": ("run_trials", "write_tuned"),
}


def test_kedro_viz_shows_each_pipeline(browser: Browser, tmp_path: Path):
    with served(["viz", "run", "--no-browser"], tmp_path) as address:
        every = {node for found in PIPELINES.values() for node in found}
        browser.open(f"{address}/?pid=__default__")
        assert shows(browser, *DEFAULT), text(browser)
        assert not any(browser.value(SHOWN % json.dumps([n])) for n in every)
        for name, nodes in PIPELINES.items():
            browser.open(f"{address}/?pid={name}&expandAllPipelines=true")
            assert shows(browser, *nodes), text(browser)
            others = every - {*nodes}
            assert not any(browser.value(SHOWN % json.dumps([n])) for n in others)
