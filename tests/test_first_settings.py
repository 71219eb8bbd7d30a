"""`kedro flatout init`: columns and tasks of files whose meaning is known, and a
training run with the result."""

import csv
import json
import random
import shutil
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner

from flatout import cli
from tests.projects import copied_conf, ran

CHANCE = random.Random(0)
WORDS = "the cat sat on a mat and ran away from home very fast indeed".split()


def text() -> str:
    return " ".join(CHANCE.choices(WORDS, k=CHANCE.randint(4, 12)))


def tagged(n: int) -> dict:
    words = text().split()
    tags = [CHANCE.choice(["O", "B-X"]) for _ in words]
    return {"tokens": words, "ner": None if n == 1 else tags}


def chat(_: int) -> dict:
    turns = (("user", text()), ("assistant", text()))
    return {"messages": [{"role": r, "content": c} for r, c in turns]}


def sharegpt(_: int) -> dict:
    turns = (("human", text()), ("gpt", text()))
    return {"conversations": [{"from": r, "value": c} for r, c in turns]}


def columns(**names: str | None) -> dict:
    """Return the settings that name the columns of `split`."""
    return {f"{role}_column": name for role, name in names.items()}


KINDS = {
    "reviews.csv": (
        lambda n: {"id": n, "review": text(), "stars": 1 + n % 5},
        "sequence-classification",
        columns(text="review", label="stars"),
    ),
    "short.csv": (
        lambda n: {"text": f"good {WORDS[n % 9]}", "label": ("bad", "so so")[n % 2]},
        "sequence-classification",
        columns(text="text", label="label"),
    ),
    "semicolons.csv": (
        lambda n: {"title": f"no {n}", "body": text(), "class": "ab"[n % 2]},
        "sequence-classification",
        columns(text="body", label="class"),
    ),
    "scores.csv": (
        lambda n: {"text": text(), "score": n / 7},
        "regression",
        columns(text="text", label="score"),
    ),
    "flags.csv": (
        lambda n: {"text": text(), "toxic": n % 2, "spam": n // 2 % 2},
        "multi-label-classification",
        columns(text="text", label=None) | {"label_columns": ["toxic", "spam"]},
    ),
    "texts.csv": (
        lambda n: {"text": text()},
        "masked-lm",
        columns(text="text", label=None),
    ),
    "splits.csv": (
        lambda n: {"text": text(), "label": "ab"[n % 2], "split": "train"},
        "sequence-classification",
        columns(text="text", split="split", label="label"),
    ),
    "labels.jsonl": (
        lambda n: {"text": text(), "labels": ["a", "b", "c"][n % 2 :]},
        "multi-label-classification",
        columns(text="text", label="labels"),
    ),
    "tags.jsonl": (
        tagged,
        "token-classification",
        columns(text="tokens", label="ner"),
    ),
    "answers.jsonl": (
        lambda n: {"question": text() if n else "", "answer": text()},
        "causal-lm",
        columns(prompt="question", completion="answer", label=None),
    ),
    "pairs.jsonl": (
        lambda n: {"Query": text(), "positive": text(), "negatives": [text()]},
        "embedding",
        columns(anchor="Query", positive="positive", negative="negatives", label=None),
    ),
    "scored.csv": (
        lambda n: {"sentence1": text(), "sentence2": text(), "score": n / 60},
        "embedding",
        columns(anchor="sentence1", positive="sentence2", label="score"),
    ),
    "rankings.jsonl": (
        lambda n: {"question": text(), "document": text(), "label": n % 2},
        "reranking",
        columns(query="question", passage="document", label="label"),
    ),
    "chats.jsonl": (
        chat,
        "causal-lm",
        columns(messages="messages", label=None),
    ),
    "sharegpt.jsonl": (
        sharegpt,
        "causal-lm",
        columns(messages="conversations", label=None),
    ),
    "calls.csv": (
        lambda n: {"conversation": text(), "label": "ab"[n % 2]},
        "sequence-classification",
        columns(text="conversation", label="label"),
    ),
    "sizes.csv": (
        lambda n: {"text": text(), "input": n, "output": n / 7, "label": "ab"[n % 2]},
        "sequence-classification",
        columns(text="text", label="label"),
    ),
    "positions.csv": (
        lambda n: {"text": text(), "label": "ab"[n % 2], "query": n, "pos": n * 2},
        "sequence-classification",
        columns(text="text", label="label"),
    ),
    "strings.jsonl": (
        lambda n: {"messages": [text()], "body": text(), "label": "ab"[n % 2]},
        "sequence-classification",
        columns(text="body", label="label"),
    ),
}


def write(file: Path, make, rows: int = 60) -> Path:
    made = [make(n) for n in range(rows)]
    with file.open("w", newline="") as out:
        if file.suffix == ".jsonl":
            out.writelines(json.dumps(row) + "\n" for row in made)
        else:
            mark = ";" if file.stem == "semicolons" else ","
            writer = csv.DictWriter(out, made[0].keys(), delimiter=mark)
            writer.writeheader()
            writer.writerows(made)
    return file


def init(conf: Path, *arguments: str):
    return CliRunner().invoke(
        cli.flatout, ["init", *map(str, arguments), f"--conf={conf}"]
    )


def accepted(conf: Path, *arguments: str) -> tuple[str, dict, dict]:
    """Return the output in one line, the catalog and the parameters."""
    done = init(conf, *arguments)
    assert done.exit_code == 0, done.output
    files = (conf / "local" / f"{name}.yml" for name in ("catalog", "parameters"))
    catalog, parameters = (yaml.safe_load(file.read_text()) for file in files)
    return " ".join(done.output.split()), catalog, parameters


@pytest.mark.parametrize("name", KINDS)
def test_columns_and_task_are_those_of_the_file(tmp_path, name):
    make, task, split = KINDS[name]
    said, catalog, parameters = accepted(tmp_path, write(tmp_path / name, make))
    assert f"task {task}." in said
    assert (parameters["model"]["task"], parameters["split"]) == (task, split)
    assert catalog["raw_texts"]["filepath"] == str(tmp_path / name)
    assert catalog["raw_texts"].get("delimiter") == (
        ";" if name == "semicolons.csv" else None
    )


@pytest.mark.parametrize(
    ("encoding", "delimiter", "words"),
    [("cp1252", ";", "\u201cgood\u201d"), ("cp949", ",", "배송이 빠르고 좋은 상품")],
)
def test_a_table_that_windows_wrote_is_read(tmp_path, encoding, delimiter, words):
    file = tmp_path / "reviews.csv"
    rows = [f"{words} {text()}{delimiter}{n % 5}" for n in range(60)]
    whole = "\n".join([f"review{delimiter}stars", *rows])
    file.write_bytes(whole.encode(encoding))
    _, catalog, parameters = accepted(tmp_path, file)
    entry = catalog["raw_texts"]
    assert (entry["encoding"], entry.get("delimiter", ",")) == (encoding, delimiter)
    assert parameters["split"] == columns(text="review", label="stars")


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_a_file_without_a_header_loses_no_row(tmp_path, suffix):
    file, mark = tmp_path / f"reviews.{suffix}", "," if suffix == "csv" else "\t"
    rows = [mark.join([text(), ("good", "bad")[n % 2]]) for n in range(60)]
    file.write_text("\n".join(rows))
    said, catalog, parameters = accepted(tmp_path, file)
    assert "the first line is a row, not names" in said
    assert catalog["raw_texts"]["column_names"] == ["column_1", "column_2"]
    assert parameters["split"] == columns(text="column_1", label="column_2")


def test_columns_that_pandas_numbered_are_names(tmp_path):
    table = pd.DataFrame([[text(), n % 2] for n in range(60)])
    table.to_csv(tmp_path / "numbered.csv", index=False)
    _, catalog, _ = accepted(tmp_path, tmp_path / "numbered.csv")
    assert "column_names" not in catalog["raw_texts"]


def test_a_parquet_file_with_a_text_that_is_not_utf8_is_read(tmp_path):
    texts = pa.array([b"\xe9", *(text().encode() for _ in range(59))])
    table = {
        "text": pa.StringArray.from_buffers(60, *texts.buffers()[1:]),
        "label": ["a", "b"] * 30,
    }
    pq.write_table(pa.table(table), tmp_path / "t.parquet")
    _, _, parameters = accepted(tmp_path, tmp_path / "t.parquet")
    assert parameters["split"] == columns(text="text", label="label")


def test_what_somebody_knows_better_counts(tmp_path):
    make = lambda n: {"a": text(), "b": f"{text()} {text()}", "c": n % 3}  # noqa: E731
    file = write(tmp_path / "t.csv", make)
    known = ("--text-column=a", "--task=regression", "--checkpoint=some/model")
    _, _, parameters = accepted(tmp_path, file, *known)
    assert parameters["split"] == columns(text="a", label="c")
    assert parameters["model"] == {"task": "regression", "name_or_path": "some/model"}
    pairs = write(tmp_path / "p.csv", lambda n: {"question": text(), "answer": text()})
    _, _, parameters = accepted(tmp_path, pairs, "--task=embedding", "--force")
    assert parameters["split"]["anchor_column"] == "question"
    assert parameters["split"]["positive_column"] == "answer"
    for wrong, said in (
        ("--text-column=x", "no column 'x'"),
        ("--task=regresion", "regression"),
    ):
        done = init(tmp_path, file, wrong, "--force")
        assert done.exit_code == 2
        assert said in done.output
    for label in ("a", "b"):
        done = init(
            tmp_path, file, "--text-column=a", f"--label-column={label}", "--force"
        )
        assert f"{label!r} is not a label column" in done.output
    alone = write(tmp_path / "alone.csv", lambda n: {"text": text()})
    done = init(tmp_path, alone, "--task=sequence-classification", "--force")
    assert "which needs labels" in done.output


@pytest.mark.parametrize("names", [("label", "category"), ("mood", "topic")])
def test_a_second_column_that_may_be_the_label_is_named(tmp_path, names):
    first, second = names
    row = lambda n: {"id": n, "text": text(), first: n % 3, second: "ab"[n % 2]}  # noqa: E731
    file = write(tmp_path / "t.csv", row)
    said, _, parameters = accepted(tmp_path, file)
    assert f"; '{second}' may be labels too (--label-column)" in said
    assert parameters["split"]["label_column"] == first
    done = init(tmp_path, file, f"--label-column={second}", "--force")
    assert "may be labels too" not in done.output


def test_the_classes_are_those_of_the_split_pipeline(tmp_path):
    """It rejects rows with an empty label, and keeps the class `N/A`."""
    labels = ["yes", "no", "N/A", ""]
    file = write(tmp_path / "a.csv", lambda n: {"text": text(), "label": labels[n % 4]})
    assert "label has 3 classes in the first 45 rows" in accepted(tmp_path, file)[0]


def test_nothing_is_replaced_unasked(tmp_path):
    file = write(tmp_path / "reviews.csv", KINDS["reviews.csv"][0])
    parameters = tmp_path / "local/parameters.yml"
    parameters.parent.mkdir()
    parameters.write_text("train: {epochs: 7}")
    done = init(tmp_path, file)
    assert done.exit_code == 2
    assert "parameters.yml would be replaced" in done.output
    assert parameters.read_text() == "train: {epochs: 7}"
    assert init(tmp_path, file, "--force").exit_code == 0
    assert init(tmp_path, file).exit_code == 0  # they say the same


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("table.npz", "kedro run --env=arrays --params=arrays.path="),
        ("photos/a/1.png", "kedro run --env=images --params=images.path="),
        (
            "numbers.csv",
            "table of numbers is read by kedro run --env=arrays --params=arrays.path=",
        ),
        ("gone.csv", "is not there"),
        ("turns.jsonl", "no column looks like text; there are 'conversations'"),
    ],
)
def test_what_holds_no_texts_is_refused(tmp_path, name, said):
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if name == "numbers.csv":
        write(file, lambda n: {"a": n, "b": n * 2 or "n/a", "c": -n / 8 or "x"})
    elif name == "turns.jsonl":
        turn = {"speaker": "me", "text": text()}
        write(file, lambda n: {"conversations": [turn]})
    elif name != "gone.csv":
        file.touch()
    done = init(tmp_path, tmp_path / name.partition("/")[0])
    assert done.exit_code in (2, 3)
    assert said in done.output
    assert not (tmp_path / "local").exists()


@pytest.mark.process
def test_what_it_writes_trains(tmp_path, empty_store):
    conf = copied_conf(tmp_path)
    (tmp_path / "data").mkdir()
    shutil.copy(empty_store, tmp_path / "data")
    assert init(conf, write(tmp_path / "reviews.csv", KINDS["reviews.csv"][0])).output
    params = f"data_dir={tmp_path / 'data'},train.max_steps=2"
    ran("run", f"--conf-source={conf}", f"--params={params}")
    report = json.loads((tmp_path / "data/08_reporting/split_report.json").read_text())
    assert sum(report["rows_out"].values()) > 40
    names = json.loads((tmp_path / "data/06_models/label_names.json").read_text())
    assert names == ["1", "2", "3", "4", "5"]
