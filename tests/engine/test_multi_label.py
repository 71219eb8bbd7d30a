"""Several labels per row: from raw columns to metrics, compared with scikit-learn."""

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from sklearn.metrics import accuracy_score, f1_score

from flatout.engine.data.raw_texts import RawTextsError
from flatout.engine.data.split import SplitError
from flatout.engine.rows.rows import rows_from_dataset
from flatout.engine.rows.tokens import TokenRows
from tests.engine.families import LABEL_NAMES as NAMES, task_of
from tests.engine.test_token_classification import not_utf8
from tests.make import text_recipes

TASK = "multi-label-classification"


def lists(count: int) -> list[list[str]]:
    return [[n for k, n in enumerate(NAMES) if row >> k & 1] for row in range(count)]


def split(frame: pd.DataFrame, **settings):
    made = text_recipes(frame, TASK, max_rejected_fraction=0.5, **settings)
    rows = [made[f"{name}_rows"].to_dataset() for name in ("train", "validation")]
    return rows, made["split_report"].value(), made["rejected_rows"].table()


def frame_of(labels) -> pd.DataFrame:
    texts = [f"text number {n} of them" for n in range(len(labels))]
    return pd.DataFrame({"text": texts, "label": labels})


FORMS = {
    "lists": frame_of(lists(200)),
    "json": frame_of([json.dumps(found) for found in lists(200)]),
    "flags": pd.DataFrame(
        {"text": frame_of(lists(200))["text"]}
        | {n: [int(n in found) for found in lists(200)] for n in NAMES}
    ),
    "words": pd.DataFrame(
        {"text": frame_of(lists(200))["text"]}
        | {n: [f"{int(n in found)}.0" for found in lists(200)] for n in NAMES}
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_lists_json_and_columns_give_the_same_rows(form):
    own = {"label_columns": NAMES} if form in ("flags", "words") else {}
    (train, _), report, rejected = split(FORMS[form], **own)
    expected = lists(200)
    pairs = zip(train["source_row"][:], train["label"][:], strict=True)
    assert all(sorted(labels) == expected[row] for row, labels in pairs)
    assert rejected.num_rows == 0
    assert report["labels"] == 3
    share = np.mean(["a" in expected[row] for row in train["source_row"][:]])
    assert report["label_shares"]["train"]["a"] == pytest.approx(share, abs=1e-6)


def test_what_is_no_list_and_what_train_never_has_goes_to_the_quarantine():
    labels = [json.dumps(found) for found in lists(200)]
    labels[3], labels[5], labels[7] = "a, b", '["a", 4.5]', None
    (_, validation), _, _ = split(frame_of(labels))
    row = validation["source_row"][0]
    labels[row] = '["a", "odd"]'
    rejected = split(frame_of(labels))[2].to_pylist()
    found = {r["row"]: (r["reason"], r["excerpt"]) for r in rejected}
    assert found[3] == ("label is not a list of names", "a, b")
    assert found[5][0] == "label is not a list of names"
    assert found[7][0] == "label is missing"
    assert found[row] == ("label has no row in the train split", "a, odd")


def test_a_name_that_is_not_utf8_rejects_its_row_alone():
    names = [[name.encode() for name in row] for row in lists(200)]
    names[3] = [b"\xe9"]
    table = pa.table({"text": frame_of(names)["text"], "label": not_utf8(names)})
    (rejected,) = split(table)[2].to_pylist()
    found = [rejected[key] for key in ("row", "reason", "excerpt")]
    assert found == [3, "label is not valid UTF-8", repr(b"\xe9")]


def test_columns_of_other_values_and_bad_settings_are_refused():
    frame = FORMS["flags"].copy()
    frame.loc[4, "b"] = 2
    frame.loc[6, "c"] = None
    found = {
        r["row"]: r["reason"] for r in split(frame, label_columns=NAMES)[2].to_pylist()
    }
    assert found == {4: "b is neither 0 nor 1", 6: "c is missing"}
    with pytest.raises(RawTextsError, match=r"label_columns\[1\] is 'bb'.*mean 'b'"):
        split(frame, label_columns=["a", "bb"])
    with pytest.raises(SplitError, match="no row of train has a label"):
        split(frame_of([[]] * 100))
    with pytest.raises(RawTextsError, match=r"model\.task is regression"):
        text_recipes(frame, "regression", label_columns=NAMES)


def test_labels_become_zeros_and_ones_that_rows_give_back():
    task = task_of(TASK)
    labels = pa.chunked_array([pa.array([[], ["c", "a"]]), pa.array([["b"]])])
    encoded = task.encode_labels(labels)
    assert encoded.type == task.token_label_type()
    ids = pa.array([[1, 2]] * 3, pa.list_(pa.int32()))
    rows = TokenRows(pa.table({"input_ids": ids, "labels": encoded}))
    expected = [[0, 0, 0], [1, 0, 1], [0, 1, 0]]
    assert rows.labels_of(np.arange(3)).tolist() == expected
    again = rows_from_dataset(Dataset(rows.table))
    assert again.labels_of(np.array([2, 1])).tolist() == expected[:0:-1]
    assert "the first 'd' in row 1" in task.label_fault(
        pa.chunked_array([[["a"], ["d"]]])
    )
    assert task.label_fault(labels) is None


@pytest.mark.parametrize("threshold", [0.5, 0.8])
def test_figures_are_scikit_learns(threshold):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(60, 3, generator=generator) * 2
    labels = (torch.rand(60, 3, generator=generator) < 0.4).float()
    task = task_of(TASK, label_threshold=threshold)
    metrics = task.metrics(torch.device("cpu"))
    padded = torch.cat([labels[20:], torch.full((4, 3), float("nan"))])
    metrics.update(logits[:20], labels[:20])
    metrics.update(torch.cat([logits[20:], torch.ones(4, 3)]), padded)
    found, given = metrics.compute(), (logits.sigmoid() > threshold).int()
    true = labels.int()
    assert found == pytest.approx(
        {
            "f1_micro": f1_score(true, given, average="micro"),
            "f1_macro": f1_score(true, given, average="macro"),
            "accuracy": accuracy_score(true, given),
        }
    )
    hits, judged = task.hits(
        torch.cat([logits, torch.ones(4, 3)]), torch.cat([labels, padded[-4:]])
    )
    assert (int(hits), int(judged)) == (round(60 * found["accuracy"]), 60)


def test_what_people_read_of_a_row():
    task = task_of(TASK)
    logits = torch.tensor([[3.0, -3.0, 2.0], [-1.0, -1.0, -1.0]])
    labels = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    found = task.judge(logits, labels)
    assert (found["label"], found["prediction"]) == (["a, c", "b"], ["a, c", ""])
    assert found["wrong"].tolist() == [False, True]
    assert float(found["score"][0]) == pytest.approx(
        float(logits[0].abs().sigmoid().prod())
    )
    assert float(found["loss"][0]) == pytest.approx(
        float(task.loss(logits[:1], labels[:1]))
    )
