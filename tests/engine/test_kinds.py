"""Guarantees of the split that are the same for texts, arrays and images."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from flatout.engine.data.split import SplitError
from tests.make import FAULTS, KINDS, SPLITS, numbers_in, raw_rows, split_recipes

every_kind = pytest.mark.parametrize("kind", KINDS)


def labelled(numbers):
    return [(n, f"label {n % 3}") for n in numbers]


def splits_of(kind, folder, rows, **options):
    made = split_recipes(kind, raw_rows(kind, folder, rows), **options)
    return {name: numbers_in(kind, made[name]) for name in SPLITS}


def rejected(made):
    found = made["rejected"].table().to_pylist()
    return [(row["source"], row["row"], row["reason"]) for row in found]


def places(kind, numbers):
    """Return the sources and row numbers of rows that `raw_rows` wrote in this
    order."""
    name = {"texts": "raw_texts", "arrays": "a.npz"}.get(kind)
    return [(name, n) if name else (f"{n}.png", 0) for n in numbers]


@every_kind
def test_fractions_are_met_and_labels_are_spread(tmp_path, kind):
    fractions = {"train": 0.6, "validation": 0.3, "test": 0.1}
    rows = splits_of(kind, tmp_path, labelled(range(900)), fractions=fractions)
    assert sorted(n for numbers in rows.values() for n in numbers) == [*range(900)]
    for name, share in fractions.items():
        spread = math.sqrt(900 * share * (1 - share))
        assert abs(len(rows[name]) - 900 * share) < 4 * spread
        for count in Counter(n % 3 for n in rows[name]).values():
            chance = math.sqrt(len(rows[name]) * 2 / 9)
            assert abs(count - len(rows[name]) / 3) < 4 * chance


@every_kind
@given(count=st.integers(60, 120), more=st.integers(0, 60), random=st.randoms())
@settings(max_examples=4, deadline=None)
def test_a_row_keeps_its_split_when_rows_are_added_or_moved(
    tmp_path_factory, kind, count, more, random
):
    folder = tmp_path_factory.mktemp(kind)
    thirds = {"train": 0.5, "validation": 0.25, "test": 0.25}
    before = splits_of(kind, folder, labelled(range(count)), fractions=thirds)
    grown = labelled(range(count + more))
    random.shuffle(grown)
    after = splits_of(kind, folder, grown, fractions=thirds)
    assert all({*before[name]} <= {*after[name]} for name in SPLITS)
    other = splits_of(kind, folder, grown, fractions=thirds, seed=1)
    assert other["test"] != after["test"]


@every_kind
def test_rows_that_are_the_same_share_a_split(tmp_path, kind):
    """All samples are kept, but only one of equal texts."""
    rows = labelled([*range(200), *range(40)])
    made = split_recipes(kind, raw_rows(kind, tmp_path, rows))
    found = {name: numbers_in(kind, made[name]) for name in SPLITS}
    for name, others in (("train", ("validation", "test")), ("validation", ("test",))):
        assert not {*found[name]} & {n for other in others for n in found[other]}
    report = made["report"].value()
    assert report.get("duplicates", report.get("repeated")) == 40
    assert sum(map(len, found.values())) == (200 if kind == "texts" else 240)


@every_kind
def test_every_row_is_accounted_for_and_a_second_pass_is_the_first(tmp_path, kind):
    raw = raw_rows(kind, tmp_path, labelled(range(200)), bad={5, 17})
    made = split_recipes(kind, raw, max_rejected_fraction=0.01)
    assert rejected(made) == [(*place, FAULTS[kind]) for place in places(kind, [5, 17])]
    report = made["report"].value()
    assert (report["rows_in"], report["rejected"]) == (200, 2)
    assert report["rejected_by_reason"] == {FAULTS[kind]: 2}
    first = made["train"].to_dataset(), dict(made["train"].facts())
    second = made["train"].to_dataset(), dict(made["train"].facts())
    assert first[0].to_dict() == second[0].to_dict() and first[1] == second[1]
    assert report["rows_out"] == {n: len(numbers_in(kind, made[n])) for n in SPLITS}
    assert sum(report["rows_out"].values()) == 198


@every_kind
def test_too_many_rejected_rows_stop_the_run_and_are_there(tmp_path, kind):
    raw = raw_rows(kind, tmp_path, labelled(range(100)), bad=range(6))
    made = split_recipes(kind, raw, max_rejected_fraction=0.01)
    assert len(rejected(made)) == 6
    with pytest.raises(SplitError) as error:
        made["train"].to_dataset()
    shown = {
        "texts": "0, 1, 2, 3, 4, ...",
        "arrays": "0, 1, 2, 3, 4, ... of a.npz",
        "images": "0.png:0, 1.png:0, 2.png:0, 3.png:0, 4.png:0, ...",
    }
    excerpt = ", the first is 'nan, 0, label 0'" if kind == "arrays" else ""
    quarantine = "rejected_rows" if kind == "texts" else f"rejected_{kind}"
    assert str(error.value) == (
        "6 of 100 rows (6.0%) cannot be used, more than split.max_rejected_fraction "
        f"0.01:\n  6 x {FAULTS[kind]}: rows {shown[kind]} (counted from 0)"
        f"{excerpt}\nAll of them are in {quarantine}. Correct the data or the column "
        "names, or raise split.max_rejected_fraction"
    )


@every_kind
def test_a_label_that_train_has_never_seen_is_rejected_by_name(tmp_path, kind):
    rows = labelled(range(200))
    row = splits_of(kind, tmp_path / "a", rows)["validation"][0]
    rows[row] = (row, "it's rare")
    made = split_recipes(kind, raw_rows(kind, tmp_path / "b", rows))
    reason = "label has no row in the train split"
    assert rejected(made) == [(*place, reason) for place in places(kind, [row])]
    assert made["rejected"].table().to_pylist()[0]["excerpt"] == "it's rare"


@every_kind
@pytest.mark.parametrize(
    ("rows", "bad", "said"),
    [
        ([(n, "one") for n in range(60)], (), "every row has the label 'one'"),
        (labelled(range(60)), {n for n in range(60) if n % 3}, "the label 'label 0'"),
        (labelled(range(4)), (), "rows are too few for split.fractions"),
        (labelled(range(60)), range(60), "there is no row that can be used: 60 x"),
    ],
)
def test_splits_of_no_use_are_refused(tmp_path, kind, rows, bad, said):
    with pytest.raises(SplitError, match=said):
        split_recipes(
            kind, raw_rows(kind, tmp_path, rows, bad), max_rejected_fraction=1
        )["train"].to_dataset()


@every_kind
def test_other_contents_and_seeds_have_other_keys(tmp_path, kind):
    """A copy has the same key."""
    rows = labelled(range(60))
    keys = [
        split_recipes(kind, raw_rows(kind, tmp_path / place, found), seed=seed)["train"]
        for place, found, seed in (
            ("a", rows, 0),
            ("b", rows, 0),
            ("a", rows, 1),
            ("c", [*rows[1:], rows[0]], 0),
        )
    ]
    one, same, *others = (recipe.key.digest for recipe in keys)
    assert one == same and one not in others
