"""Splits that the user provides: in separate entries, in a DatasetDict, or in a
column."""

from itertools import chain

import datasets
import pandas as pd
import pytest

from flatout.engine.data.given_splits import SplitTexts
from flatout.engine.data.raw_texts import RawTextsError, open_raw_texts
from flatout.engine.data.readers.text_files import TextFiles
from flatout.engine.data.split import SplitError
from tests.make import text_recipes

SPLITS = ("train", "validation", "test")


def frame_of(name: str, count: int) -> pd.DataFrame:
    texts = [f"{name} text {n}" for n in range(count)]
    return pd.DataFrame({"text": texts, "label": [f"c{n % 2}" for n in range(count)]})


FRAMES = {"train": frame_of("a", 60), "validation": frame_of("b", 9)}
FRAMES["test"] = frame_of("c", 7)


def csv_files(folder, frames) -> SplitTexts:
    parts = {}
    for name, frame in frames.items():
        (folder / name).mkdir()
        frame.to_csv(folder / name / "data.csv", index=False)
        parts[name] = TextFiles(folder / name / "data.csv")
    return SplitTexts(parts)


def in_memory(folder, frames) -> SplitTexts:
    return SplitTexts(
        {n: open_raw_texts(f, f"raw_{n}_texts") for n, f in frames.items()}
    )


def dataset_dict(folder, frames):
    spelled = {"validation": "dev"}
    return datasets.DatasetDict(
        {spelled.get(n, n): datasets.Dataset.from_pandas(f) for n, f in frames.items()}
    )


def one_table(folder, frames) -> pd.DataFrame:
    spelled = {"train": "Training", "validation": "eval", "test": "test "}
    parts = [f.assign(part=spelled[n]) for n, f in frames.items()]
    return pd.concat(parts, ignore_index=True)


def split(data, **options):
    made = text_recipes(data, **options)
    rows = {name: made[f"{name}_rows"].to_dataset() for name in SPLITS}
    return rows, made["split_report"].value(), made["rejected_rows"].table().to_pylist()


FORMS = (csv_files, in_memory, dataset_dict, one_table)


@pytest.mark.parametrize("form", FORMS)
def test_splits_are_used_as_they_are(form, tmp_path):
    own = {"split_column": "part"} if form is one_table else {}
    rows, report, rejected = split(form(tmp_path, FRAMES), **own)
    for name, frame in FRAMES.items():
        assert rows[name]["text"][:] == frame["text"].tolist()
        assert rows[name]["label"][:] == frame["label"].tolist()
    assert report["rows_out"] == {"train": 60, "validation": 9, "test": 7}
    assert (report["leaks"], rejected) == ([], [])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("missing", [("validation",), ("validation", "test")])
def test_a_missing_split_is_taken_from_train(form, missing, tmp_path):
    own = {"split_column": "part"} if form is one_table else {}
    own |= {"fractions": {"train": 0.5, "validation": 0.25, "test": 0.25}}
    given = {n: f for n, f in FRAMES.items() if n not in missing}
    if form is dataset_dict and len(given) == 1:
        pytest.skip("one split alone is split as any rows are")
    rows, report, _ = split(form(tmp_path, given), **own)
    for name in set(given) - {"train"}:
        assert rows[name]["text"][:] == FRAMES[name]["text"].tolist()
    dealt = [rows[name]["text"][:] for name in ("train", *missing)]
    assert sorted(chain(*dealt)) == sorted(FRAMES["train"]["text"])
    expected = 60 * 0.25 / (0.5 + 0.25 * len(missing))
    for name in missing:
        assert abs(report["rows_out"][name] - expected) < 12
    again, _, _ = split(form((tmp_path / "x").mkdir() or tmp_path / "x", given), **own)
    assert again["train"]["text"][:] == rows["train"]["text"][:]


@pytest.mark.parametrize("form", FORMS)
def test_leaks_are_reported_with_their_rows_and_dropped_where_asked(
    form, tmp_path, caplog
):
    own = {"split_column": "part"} if form is one_table else {}
    frames = {n: f.copy() for n, f in FRAMES.items()}
    frames["test"].loc[3, "text"] = frames["train"].loc[8, "text"] = "the same"
    frames["train"].loc[9, "text"] = "the same"
    frames["validation"].loc[2, "text"] = frames["train"].loc[20, "text"]
    data = form(tmp_path, frames)
    rows, report, _ = split(data, **own)
    assert report["texts_in_two_splits"] == 2
    shown = {
        csv_files: [
            ["row train/data.csv:8", "row test/data.csv:3"],
            ["row train/data.csv:20", "row validation/data.csv:2"],
        ],
        one_table: [["row 8", "row 72"], ["row 20", "row 62"]],
    }
    plain = [
        ["row train:8", "row test:3"],
        ["row train:20", "row validation:2"],
    ]
    assert report["leaks"] == shown.get(form, plain)
    assert len(rows["train"]) == 60
    assert "split.on_leak: drop" in caplog.text
    rows, dropped, _ = split(data, **own, on_leak="drop")
    assert (len(rows["train"]), dropped["duplicates"]) == (57, 3)
    assert dropped["leaks"] == report["leaks"]
    assert dropped["texts_in_two_splits"] == 0
    assert (len(rows["validation"]), len(rows["test"])) == (9, 7)


def test_another_split_of_the_same_rows_has_another_key(tmp_path):
    swapped = {**FRAMES, "test": FRAMES["validation"], "validation": FRAMES["test"]}
    keys = [
        text_recipes(in_memory(tmp_path, f))["train_rows"].key
        for f in (FRAMES, FRAMES, swapped)
    ]
    assert keys[0].digest == keys[1].digest != keys[2].digest


def test_bad_splits_are_refused_or_rejected_with_rows(tmp_path):
    other = {**FRAMES, "test": FRAMES["test"].rename(columns={"text": "txt"})}
    with pytest.raises(RawTextsError, match=r"raw_test_texts has .*mean 'txt'"):
        split(in_memory(tmp_path, other))
    empty = {**FRAMES, "validation": FRAMES["validation"][:0]}
    with pytest.raises(SplitError, match=r"raw_validation_texts is empty.*drawn from"):
        split(in_memory(tmp_path, empty))
    with pytest.raises(RawTextsError, match="their own entries"):
        split(
            in_memory(tmp_path, {n: f.assign(part=n) for n, f in FRAMES.items()}),
            split_column="part",
        )
    unknown = dataset_dict(tmp_path, FRAMES)
    unknown["unsupervised"] = unknown["test"]
    with pytest.raises(RawTextsError, match="train, dev, test, unsupervised: train"):
        split(unknown)
    table = one_table(tmp_path, FRAMES)
    table.loc[5, "part"], table.loc[6, "part"] = "holdout", None
    rows, _, rejected = split(table, split_column="part", max_rejected_fraction=0.1)
    found = {r["row"]: (r["reason"], r["excerpt"]) for r in rejected}
    reason = "part must be train, validation (val, dev, eval) or test"
    assert found[5] == (reason, "holdout")
    assert found[6][0] == "part is missing"
    assert len(rows["train"]) == 58
    broken = {**FRAMES, "test": FRAMES["test"].assign(text=" ")}
    with pytest.raises(SplitError, match="no usable row is left in test"):
        split(in_memory(tmp_path, broken), max_rejected_fraction=0.5)
