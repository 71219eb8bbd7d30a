"""`kedro doctor`: the command as users run it, and the checks of the catalog."""

import json
from pathlib import Path

import pandas as pd
import pytest
from kedro.io import DataCatalog

from flatout.datasets import DocstringCorpus, KeyedArrowDataset, TextFiles
from flatout.doctor import as_json, data
from flatout.doctor.finding import examine
from flatout.engine.data.raw_texts import RawTextsError
from flatout.engine.files.content_key import ContentKey
from flatout.engine.files.keyed_folder import write_whole
from flatout.engine.machine.checks import Finding
from flatout.engine.parameters import Settings
from flatout.engine.tokenizing.token_recipes import token_options
from tests.conftest import kedro
from tests.projects import ran

CHECKS = [
    *("parameters", "versions", "device", "GPU memory", "compiler", "threads"),
    *("/dev/shm", "disk", "file system"),  # noqa: S108 - its name
    *("data", "labels", "tokens", "model", "memory"),
]


def test_a_row_a_check_as_json(tmp_path):
    said = ran("doctor", "--env=test", "--json", f"--params=data_dir={tmp_path}")
    rows = json.loads(said.splitlines()[-1])
    assert [row["check"] for row in rows] == CHECKS
    assert {tuple(row) for row in rows} == {("check", "status", "finding", "fix")}
    found = {row["check"]: row for row in rows}
    assert found["parameters"]["finding"] == "valid (environment test)"
    assert found["tokens"]["finding"] == "none yet: kedro run creates them"
    assert found["data"]["finding"] == "the built-in corpus; the first run parses it"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["arrays", "images"])
def test_samples_are_no_texts(tmp_path, kind):
    said = ran("doctor", f"--env={kind}", "--json", f"--params=data_dir={tmp_path}")
    found = {row["check"]: row for row in json.loads(said.splitlines()[-1])}
    assert not {"data", "labels", "tokens"} & found.keys()
    assert found[kind]["finding"] == "none yet: kedro run creates them"


def test_a_fail_is_exit_code_1_and_a_table(tmp_path):
    done = kedro(
        "flatout",
        "doctor",
        "--env=test",
        f"--params=data_dir={tmp_path},train.global_batchsize=8",
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stdout
    rows = [line.split("│") for line in done.stdout.splitlines() if "│" in line]
    findings = " ".join(" ".join(row[3].split()) for row in rows)
    assert [cell.strip() for cell in rows[0][1:3]] == ["parameters", "fail"]
    assert findings.startswith("1 parameter cannot be used; nothing was run.")
    assert "unknown parameter; did you mean train.global_batch_size?" in findings
    assert {row[1].strip() for row in rows} & {"data", "tokens", "model"} == set()


def test_a_misspelt_type_in_the_catalog_is_a_fail():
    catalog = DataCatalog.from_config({"raw_texts": {"type": "pandas.CSVDatset"}})
    [found] = examine({"data": lambda: data.raw_rows(catalog, Settings())})
    assert (found.check, found.status, found.fix) == (
        "data",
        "fail",
        "see the message",
    )
    assert found.finding.startswith(
        "An exception occurred when parsing config for dataset 'raw_texts': Dataset "
        "'CSVDatset' not found in 'pandas'."
    )


def test_json_is_one_line():
    found = Finding("disk", "warn", "1.0 GiB free\nhere", "free space")
    assert as_json([found]) == (
        '[{"check": "disk", "status": "warn", "finding": "1.0 GiB free\\nhere", '
        '"fix": "free space"}]'
    )


def frame(**columns) -> pd.DataFrame:
    return pd.DataFrame(columns)


def judged(rows: pd.DataFrame, **parameters) -> list[tuple[str, str, str, str]]:
    found = data.split_findings(rows, Settings(**parameters))
    return [(f.check, f.status, f.finding, f.fix) for f in found]


def test_columns_and_labels():
    rows = frame(text=["a", "b", "c d"], label=["x", "y", "x"])
    assert judged(rows) == [
        (
            "data",
            "ok",
            "columns text, label are there; 3 of the first 3 rows usable",
            "",
        ),
        ("labels", "ok", "2 in the first 3 usable rows: x, y", ""),
    ]


def test_columns_that_are_not_there():
    with pytest.raises(RawTextsError, match=r"split\.text_column is 'text'"):
        judged(frame(review=["a"], label=["x"]))


def test_rows_that_cannot_be_used():
    rows = frame(text=["a", "", "c"], label=["x", "y", "x"])
    first, labels = judged(rows)
    assert first == (
        "data",
        "fail",
        "columns text, label are there; 2 of the first 3 rows usable, which is too few "
        "for split.max_rejected_fraction 0.01; row 1: text is empty",
        "correct the rows, or raise split.max_rejected_fraction; later rows may do",
    )
    assert labels[1:3] == (
        "warn",
        "1 in the first 2 usable rows: x",
    )


def test_numbers_in_place_of_texts():
    assert judged(frame(text=["1", "2"], label=["x", "y"]))[0] == (
        "data",
        "warn",
        "each text in 'text' is a number, such as '1'",
        "is split.text_column right?",
    )


def test_tasks_without_classes():
    language = {"task": "causal-lm", "config": {"model_type": "gpt2"}}
    found = judged(frame(text=["a", "b"], label=[0.5, 2.0]), model=language)
    assert found[1][2] == "causal-lm has no classes"


def test_data_that_is_not_there(tmp_path):
    catalog = DataCatalog({"raw_texts": TextFiles(filepath=str(tmp_path / "no.csv"))})
    [found] = data.raw_rows(catalog, Settings())
    assert found.status == "fail"
    assert "no.csv" in found.finding
    corpus = DocstringCorpus(filepath=str(tmp_path), labels=2)
    found = data.raw_rows(DataCatalog({"raw_texts": corpus}), Settings())
    assert [f.status for f in found] == ["ok", "ok"]
    url = TextFiles(filepath="s3://bucket/a.csv")  # s3fs is missing, so nothing is read
    [found] = data.raw_rows(DataCatalog({"raw_texts": url}), Settings())
    assert (found.status, found.finding[:18]) == ("ok", "raw_texts is a URL")


def test_tokens_made_with_other_parameters(tmp_path: Path):
    catalog = DataCatalog({"train_tokens": KeyedArrowDataset(filepath=str(tmp_path))})
    then = Settings(tokenize={"max_length": 320})
    key = ContentKey(token_options(then.model, then.tokenize))
    write_whole(tmp_path, key, lambda _: {})
    found = data.rows(catalog, then).finding
    assert found == "they match the parameters and the data"
    found = data.rows(catalog, Settings(tokenize={"max_length": 128}))
    assert (found.status, found.finding, found.fix) == (
        "warn",
        "made with other parameters (then -> now): tokenize.max_length: 320 -> 128",
        "kedro run --pipelines=split,tokenize, or set the parameters back",
    )
