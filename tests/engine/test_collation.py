"""Exact tensors of packed and padded batches."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, strategies as st

from flatout.engine.batches.buffers import in_one_buffer, places
from flatout.engine.batches.collation import StepRows, StepRun
from flatout.engine.batches.global_batches import GlobalBatches, Planner
from flatout.engine.models.flops import AttentionPairs
from flatout.engine.ops.attention import PACKED
from flatout.engine.rows.arrays import ArrayRows
from flatout.engine.rows.layout import Layout
from flatout.engine.rows.tokens import TokenRows, TokenRowsError
from flatout.engine.rows.vocabulary import Vocabulary
from flatout.engine.tasks import IGNORED
from tests.engine.families import built, collator_of, rows_of, task_model

IDS = [[2, 7, 3], [2, 8, 9, 10, 3], [2, 3]]


def rows(labels=(1, 0, 2), **columns) -> TokenRows:
    table = {"input_ids": pa.array(IDS, pa.list_(pa.int32())), **columns}
    if labels is not None:
        table["labels"] = pa.array(labels)
    return TokenRows(pa.table(table))


def collate(task="sequence-classification", packed=False, data=None, **options):
    collator = collator_of(task, packed=packed, **options)
    return collator.collate(data or rows(), np.array([0, 1, 2]), epoch=0)


def test_right_padding():
    batch = collate()
    assert batch["input_ids"].tolist() == [
        [2, 7, 3, 0, 0],
        [2, 8, 9, 10, 3],
        [2, 3, 0, 0, 0],
    ]
    assert batch["attention_mask"].tolist() == [
        [True, True, True, False, False],
        [True, True, True, True, True],
        [True, True, False, False, False],
    ]
    assert batch["target_index"].tolist() == [0, 5, 10]
    assert batch["labels"].tolist() == [1, 0, 2]
    assert "cu_seqlens" not in batch


def test_right_padding_to_a_length_and_to_a_multiple():
    assert collate(pad_to_length=7)["input_ids"].shape == (3, 7)
    assert collate(pad_multiple=4)["input_ids"].shape == (3, 8)
    # A model may not have more positions than that.
    assert collate(pad_multiple=4, max_length=6)["input_ids"].shape == (3, 6)


def test_packing():
    batch = collate(packed=True)
    assert batch["input_ids"].tolist() == [[2, 7, 3, 2, 8, 9, 10, 3, 2, 3]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 0, 1]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 8, 10]
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["target_index"].tolist() == [0, 3, 8]
    assert "attention_mask" not in batch


def test_packing_to_few_shapes():
    batch = collate(packed=True, pad_multiple=16, row_multiple=8, max_length=5)
    assert batch["input_ids"].tolist() == [[2, 7, 3, 2, 8, 9, 10, 3, 2, 3] + [0] * 6]
    # There are six padding tokens in rows of at most max_length, followed by empty
    # rows.
    assert batch["cu_seqlens"].tolist() == [0, 3, 8, 10, 15, 16, 16, 16, 16]
    assert batch["position_ids"][0, 10:].tolist() == [0, 1, 2, 3, 4, 0]
    assert batch["labels"].tolist() == [1, 0, 2] + [IGNORED] * 5
    assert batch["target_index"].tolist() == [0, 3, 8] + [0] * 5


@given(
    st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=9), max_size=8),
    st.booleans(),
    st.integers(1, 12),
    st.integers(1, 5),
)
def test_rows_come_out_of_a_layout_as_they_went_in(
    rows, packed, multiple, row_multiple
):
    layout = Layout(
        packed, pad_multiple=multiple, row_multiple=row_multiple, max_length=9
    )
    laid = layout.lay_out(rows, {})
    flat, starts = laid.fields["input_ids"].ravel(), laid.starts.tolist()
    found = [flat[n : n + len(r)].tolist() for n, r in zip(starts, rows, strict=True)]
    assert found == rows
    assert flat.sum() == sum(map(sum, rows))  # the rest is padding
    assert flat.size == layout.num_padded_tokens(np.array([*map(len, rows)], int))
    if packed:
        bounds = laid.fields["cu_seqlens"].tolist()
        assert bounds[: len(rows)] == starts and bounds[-1] == flat.size
        assert max(np.diff(bounds)) <= 9 and (len(bounds) - 1) % row_multiple == 0
    else:
        assert (laid.fields["attention_mask"].sum(1)[: len(rows)]).tolist() == [
            len(row) for row in rows
        ]


def test_decoders_classify_from_the_last_token():
    assert collate(pools_last=True)["target_index"].tolist() == [2, 9, 11]
    assert collate(packed=True, pools_last=True)["target_index"].tolist() == [
        2,
        7,
        9,
    ]


@pytest.mark.parametrize("packed", [False, True])
def test_a_text_that_ends_with_the_padding_token_is_read_as_transformers_reads_it(
    packed,
):
    """The token is also the end token. One text consists of it alone."""
    task, ends = "sequence-classification", [[2, 7, 3, 0], [5, 0, 0], [2, 8], [0, 0]]
    model = task_model("gpt2", task, PACKED if packed else "sdpa").eval()
    data = rows_of(task, ends)
    batch = collator_of(task, packed=packed, pools_last=True).collate(
        data, np.arange(4), epoch=0
    )
    plain = built("gpt2", task).eval()
    with torch.no_grad():
        found = model.logits(batch)
        expected = [plain(input_ids=torch.tensor([ids])).logits for ids in ends]
    torch.testing.assert_close(found, torch.cat(expected))


def test_causal_targets_are_the_next_tokens():
    batch = collate("causal-lm", packed=True)
    assert batch["target_index"].tolist() == [0, 1, 3, 4, 5, 6, 8]
    assert batch["labels"].tolist() == [7, 3, 8, 9, 10, 3, 3]
    padded = collate("causal-lm")
    assert padded["labels"].tolist() == batch["labels"].tolist()
    assert padded["target_index"].tolist() == [0, 1, 5, 6, 7, 8, 10]


def test_targets_of_a_language_model_are_rounded_up_as_its_tokens_are():
    batch = collate("causal-lm", packed=True, pad_multiple=16, row_multiple=8)
    assert batch["input_ids"].shape == (1, 16)
    assert batch["target_index"].tolist() == [0, 1, 3, 4, 5, 6, 8] + [0] * 9
    assert batch["labels"].tolist() == [7, 3, 8, 9, 10, 3, 3] + [IGNORED] * 9


def test_places_without_a_target_fill_up_one_shape():
    """They keep the order of the states, so that a model need not select any states."""
    batch = collate("causal-lm", every_place=True)
    none = IGNORED
    rows = [[7, 3, none, none, none], [8, 9, 10, 3, none], [3, *[none] * 4]]
    assert batch["target_index"].tolist() == list(range(15))
    assert batch["labels"].view(3, 5).tolist() == rows
    one_a_row = collate(every_place=True)
    assert one_a_row["target_index"].tolist() == [0, 5, 10]


def test_masked_targets_do_not_depend_on_the_batch():
    options = {
        "vocabulary": Vocabulary(50, 0, 4, special_token_ids=(0, 2, 3)),
        "mask_probability": 0.5,
    }
    collator = collator_of("masked-lm", packed=True, **options)
    together = collator.collate(rows(), np.array([0, 1, 2]), epoch=1)
    alone = collator.collate(rows(), np.array([1]), epoch=1)
    # Row 2 has only special tokens and thus no target. Row 1 has 3 candidates, half of
    # which are 2.
    assert len(together["labels"]) == 3
    assert together["labels"][1:].tolist() == alone["labels"].tolist()
    assert together["input_ids"][0, 3:8].tolist() == alone["input_ids"][0].tolist()
    assert collator.task.num_targets(rows(), np.array([0, 1, 2]), 1) == 3
    other = collator.collate(rows(), np.array([1]), epoch=2)
    assert other["input_ids"].tolist() != alone["input_ids"].tolist()


def test_of_masked_targets_eight_in_ten_are_masks_and_one_in_ten_another_piece():
    """The fractions are within five standard deviations of the binomial distribution
    for 14,000 targets."""
    special, vocabulary, rng = (0, 1, 3, 4, 99), 100, np.random.default_rng(1)
    pieces = np.setdiff1d(np.arange(vocabulary), special)
    ids = rng.choice(pieces, (2_000, 48))
    data = TokenRows(pa.table({"input_ids": pa.array(ids.tolist())}))
    known = Vocabulary(vocabulary, 0, 4, special_token_ids=special)
    collator = collator_of("masked-lm", packed=True, vocabulary=known)
    batch = collator.collate(data, np.arange(2_000), epoch=3)
    targets = batch["target_index"].numpy()
    assert len(targets) == 2_000 * round(0.15 * 48)
    found, real = batch["input_ids"].numpy()[0], ids.reshape(-1)
    assert (batch["labels"].numpy() == real[targets]).all()
    untouched = np.setdiff1d(np.arange(len(real)), targets)
    assert (found[untouched] == real[untouched]).all()
    masked, kept = found[targets] == 4, found[targets] == real[targets]
    drawn = found[targets][~masked & ~kept]
    # A random piece sometimes equals the original one.
    same = 0.1 / len(pieces)
    counts = (masked.sum(), kept.sum(), len(drawn))
    for count, share in zip(counts, (0.8, 0.1 + same, 0.1 - same), strict=True):
        deviation = (len(targets) * share * (1 - share)) ** 0.5
        assert abs(count - len(targets) * share) < 5 * deviation
    assert set(drawn) == set(pieces)  # all of them occur, and no special ones


def test_regression_keeps_floats_and_marks_absent_targets_with_nan():
    data = rows(labels=(0.5, -100.0, 2.0))
    batch = collate("regression", packed=True, data=data, row_multiple=4)
    assert batch["labels"][:3].tolist() == [0.5, -100.0, 2.0]
    assert batch["labels"][3].isnan()


def test_an_empty_batch_is_one_token_without_a_target():
    for packed in (False, True):
        collator = collator_of("sequence-classification", packed=packed)
        batch = collator.collate(rows(), np.array([], dtype=np.int64), epoch=0)
        assert batch["input_ids"].tolist() == [[0]]
        assert batch["labels"].tolist() == [IGNORED]


def test_token_types_are_laid_out_like_the_tokens():
    kinds = pa.array([[0, 0, 1], [0, 0, 1, 1, 1], [0, 1]], pa.list_(pa.int8()))
    data = rows(token_type_ids=kinds)
    batch = collate(data=data)
    assert batch["token_type_ids"].tolist() == [
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 1],
        [0, 1, 0, 0, 0],
    ]


def test_one_buffer_holds_every_tensor():
    batch = collate(packed=True)
    arrays = {name: tensor.numpy() for name, tensor in batch.items()}
    buffer, layout = in_one_buffer([arrays, arrays])
    size, found = places(layout)
    assert (buffer.dtype, len(buffer)) == (torch.uint8, size)
    assert [sorted(part) for part in found] == [sorted(arrays)] * 2
    assert all(place[0] % 64 == 0 for part in found for place in part.values())
    for part in found:
        for name, (begin, end, dtype, shape) in part.items():
            stored = buffer[begin:end].view(dtype).view(shape)
            assert torch.equal(stored, batch[name])


def step_rows(world_size=1, rank=0, strategy="packed", budget=8, **options):
    planner = Planner(strategy, budget, 5, world_size)
    collator = collator_of(
        "sequence-classification", packed=strategy == "packed", **options
    )
    pairs = AttentionPairs(causal=False, layers_by_reach={None: 1})
    return StepRows(rows(), GlobalBatches(3, 3, seed=0), planner, collator, rank, pairs)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["packed", "random"])
@pytest.mark.parametrize("multiple", [1, 4])
def test_counts_are_of_the_global_batch_on_every_rank(strategy, world_size, multiple):
    data = [
        step_rows(world_size, rank, strategy, pad_multiple=multiple)
        for rank in range(world_size)
    ]
    steps = [part[0] for part in data]
    micros = [micro for step in steps for micro in step.micro_batches]
    computed = sum(micro["input_ids"].numel() for micro in micros)
    for step in steps:
        assert step.num_padded_tokens == computed >= 10
        assert (step.num_samples, step.num_targets, step.num_tokens) == (3, 3, 10)
        assert step.attention_pairs == 9 + 25 + 4
        assert sorted(step.row_ids.tolist()) == [0, 1, 2]


def test_a_step_survives_the_trip_through_its_buffer():
    step = step_rows(budget=16)[0]
    (micro,) = step.micro_batches
    lengths = micro["cu_seqlens"].diff().tolist()
    assert sorted(lengths) == [2, 3, 5]
    assert micro["input_ids"].numel() == 10


def test_a_run_of_steps_is_one_buffer():
    data = step_rows(budget=16)
    steps = [data[number] for number in range(3)]
    run = StepRun.of(steps)
    assert len(run.buffer) == sum(len(step.buffer) for step in steps)
    for step, found in zip(steps, run, strict=True):
        assert found.buffer.data_ptr() % 8 == 0
        assert torch.equal(found.buffer, step.buffer)
        assert (found.step, found.layout) == (step.step, step.layout)
    (alone,) = StepRun.of(steps[:1])
    assert alone.buffer.data_ptr() == steps[0].buffer.data_ptr()


def test_rows_without_tokens_are_refused():
    with pytest.raises(TokenRowsError, match="need a column input_ids"):
        TokenRows(pa.table({"text": ["a"]}))
    with pytest.raises(TokenRowsError, match="the split is empty"):
        TokenRows(pa.table({"input_ids": pa.array([], pa.list_(pa.int32()))}))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("input_ids", [[1, None, 2], [3]]),
        ("input_ids", [[1], None]),
        ("labels", [1, None]),
        ("inputs", [[0.5, None], [1.0, 2.0]]),
    ],
)
def test_rows_with_missing_values_are_refused(name, values):
    """pyarrow reads a missing number as NaN."""
    kind = ArrayRows if name == "inputs" else TokenRows
    columns = {kind.column: [[1, 2], [3, 4]], "labels": [0, 1], name: values}
    types = {"inputs": pa.list_(pa.float32(), 2), "labels": pa.int64()}
    schema = pa.schema([(c, types.get(c, pa.list_(pa.int64()))) for c in columns])
    with pytest.raises(TokenRowsError, match=f"column {name} .* missing values"):
        kind(pa.table(columns, schema))
