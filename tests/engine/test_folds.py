"""Folds have scikit-learn's sizes and keep groups together, or are refused."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from datasets import Dataset
from sklearn.model_selection import KFold, PredefinedSplit, StratifiedKFold

from flatout.engine.data.columns import Columns
from flatout.engine.data.split import SplitError
from flatout.engine.parameters import SettingsError, SplitSettings
from flatout.engine.rows.rows import open_rows
from flatout.engine.sweep.folds import fold_files
from flatout.engine.tasks import columns_of
from tests.engine import benches
from tests.engine.test_split import NAMES, split

CLASSES = Columns("text", None, "label", None)
UNLABELLED = Columns("text", None, None, None)
GROUPED = Columns("text", None, "label", "patient")


def frame_of(rows, labels=3):
    """Return labels of different frequency, and patients with 1 to 6 rows."""
    draws = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "text": [f"text number {i} of many" for i in range(rows)],
            "label": [f"{i}" for i in draws.binomial(labels - 1, 0.3, rows)],
            "patient": [f"p{i}" for i in draws.integers(0, rows // 3, rows)],
        }
    )


def folds_of(frame, columns=CLASSES, **options):
    """Return the fold of each row, in the order of the raw rows."""
    parts, _, _ = split(frame, columns, **options)
    rows = pd.concat([pd.DataFrame(parts[name][:]) for name in NAMES])
    assert sorted(rows["source_row"]) == list(range(len(frame)))
    return rows.sort_values("source_row")["fold"].to_numpy()


def sizes(folds, labels):
    """Return the sorted counts of each label, as (labels, folds)."""
    table = pd.crosstab(labels, folds).to_numpy()
    return np.sort(table, axis=1).tolist()


@pytest.mark.parametrize("folds", [2, 5, 7])
@pytest.mark.parametrize("rows", [331, 600])
def test_each_label_is_spread_as_scikit_learn_does(rows, folds):
    frame = frame_of(rows)
    ours, theirs = folds_of(frame, folds=folds), np.empty(rows, int)
    splitter = StratifiedKFold(folds).split(frame["text"], frame["label"])
    for number, (_, test) in enumerate(splitter):
        theirs[test] = number
    assert sizes(ours, frame["label"]) == sizes(theirs, frame["label"])
    assert np.sort(np.bincount(ours)).tolist() == np.sort(np.bincount(theirs)).tolist()


def test_without_labels_the_folds_are_as_large_as_scikit_learns():
    frame = frame_of(331)
    ours = folds_of(frame, UNLABELLED, folds=5)
    theirs = [len(test) for _, test in KFold(5).split(frame)]
    assert sorted(np.bincount(ours)) == sorted(theirs)


def test_a_rare_set_of_labels_is_no_class_and_few_rows_are_refused():
    frame = frame_of(331)
    frame["label"] = [["a", "b"] if row < 2 else ["a"] for row in range(331)]
    several = columns_of(SplitSettings(), "multi-label-classification")
    assert np.bincount(folds_of(frame, several, folds=5)).min() == 66
    with pytest.raises(SplitError, match="'the data' has different texts"):
        folds_of(frame_of(90), UNLABELLED, folds=100)


def test_a_group_and_texts_of_another_case_are_in_one_fold():
    frame = frame_of(600)
    folds = folds_of(frame, GROUPED, folds=5, group_column="patient")
    assert (pd.Series(folds).groupby(frame["patient"]).nunique() == 1).all()
    counts = np.bincount(folds)
    assert counts.min() > 0.8 * counts.max()
    twice = pd.concat([frame, frame.assign(text=frame["text"].str.upper())])
    folds = folds_of(twice.reset_index(drop=True), folds=5)
    assert (folds[:600] == folds[600:]).all()


def test_the_seed_decides_and_the_split_stays():
    frame = frame_of(600)
    first, again = (folds_of(frame, folds=5) for _ in range(2))
    assert (first == again).all()
    assert (first != folds_of(frame, folds=5, seed=1)).any()
    plain, folded = (split(frame, folds=n)[0] for n in (None, 5))
    for name in NAMES:
        assert plain[name]["text"][:] == folded[name]["text"][:]
    assert "fold" not in plain["train_rows"].column_names


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (None, {"folds": 40}, "'2' has different texts or groups for only 30"),
        ("patient", {"folds": 2}, "only 1 folds. Set split.folds to at most 2"),
        ("part", {"folds": 2}, "the data gives the split of each row"),
    ],
)
def test_folds_that_cannot_be_are_refused_with_the_remedy(change, options, message):
    frame = pd.DataFrame(
        {
            "text": [f"text number {i} of many" for i in range(330)],
            "label": ["0"] * 150 + ["1"] * 150 + ["2"] * 30,
            "patient": [f"p{i}" for i in range(330)],
            "part": ["train", "train", "validation", "test", "train"] * 66,
        }
    )
    columns = CLASSES
    if change == "patient":
        frame.loc[300:, "patient"] = "one"
        columns, options = GROUPED, {**options, "group_column": "patient"}
    if change == "part":
        columns = Columns("text", None, "label", None, split="part")
    with pytest.raises(SplitError) as refused:
        split(frame, columns, **options)
    assert message in str(refused.value)
    assert "split.folds" in str(refused.value)


def test_the_files_of_the_folds_are_those_of_a_predefined_split(tmp_path):
    files = benches.job_files(tmp_path, rows=60)
    folds = np.arange(84) % 4
    made = fold_files(files, splits_of(folds, [60, 72]), 4, tmp_path / "rows")
    parts = files.splits.values()
    whole = pa.concat_tables([open_rows(Path(part)).table for part in parts])
    for one, (rest, test) in zip(made, PredefinedSplit(folds).split(), strict=True):
        assert rows_of(one.splits["test"]) == whole.take(test).to_pylist()
        validation = [row for row in rest if 60 <= row < 72]
        assert rows_of(one.splits["validation"]) == whole.take(validation).to_pylist()
        train = [row for row in rest if not 60 <= row < 72]
        assert rows_of(one.splits["train"]) == whole.take(train).to_pylist()
        assert one.vocabulary == files.vocabulary
        assert one.label_names == files.label_names
    assert len({one.data_key for one in made}) == 4


def rows_of(folder):
    return open_rows(Path(folder)).table.to_pylist()


def splits_of(folds, at):
    return [Dataset.from_dict({"fold": part}) for part in np.split(folds, at)]


def test_rows_without_these_folds_are_refused(tmp_path):
    parts, _, _ = split(frame_of(300), folds=3)
    splits = [parts[name] for name in NAMES]
    plain = [rows.remove_columns("fold") for rows in splits]
    for given, folds, told in (
        (splits, 5, "split.folds is 5, and the rows have 3"),
        (splits, None, "split.folds is null, and the rows have 3"),
        (plain, 3, "split.folds is 3, and the rows have no"),
        (splits, 3, "tokenize.join_texts"),
    ):
        with pytest.raises(SettingsError) as refused:
            fold_files(benches.job_files(tmp_path), given, folds, tmp_path)
        assert told in str(refused.value)
        assert "kedro run --pipelines=split,tokenize" in str(refused.value)
