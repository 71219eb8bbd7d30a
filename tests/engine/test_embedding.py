"""Text vectors: their loss, its gradient however a step is divided, and the metrics."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from transformers import AutoModel

from flatout.engine.machine.runtime import set_up
from flatout.engine.models.model import GRADIENT
from flatout.engine.parameters import ModelSettings, SettingsError, parse_settings
from flatout.engine.rows.tokens import TokenRows
from flatout.engine.sweep.space import objective
from flatout.engine.tasks import TaskError, make_task
from flatout.engine.tasks._shared.ranking import Retrieval
from flatout.engine.train.loop import evaluate_split, train
from flatout.engine.train.setup.assemble import assemble, build_model
from tests.engine.families import CONFIGS
from tests.engine.plain import on_two_ranks
from tests.engine.runs import NO_DROPOUT, make_job, metrics_of

NEAR = {"rtol": 1e-4, "atol": 1e-5}
TEMPERATURE = 0.1
PAIRS = 32
"""Number of pairs in a global batch."""
BUDGETS = {"32 pairs": "auto", "8 pairs": 8 * 32, "1 pair": 24}


def pair_rows(count, negatives=0, seed=3):
    """Return samples of different texts with 3 to 24 tokens."""
    chance = np.random.default_rng(seed)
    texts = [
        [1, *chance.integers(5, 100, chance.integers(1, 23)).tolist(), 2]
        for _ in range(count * (2 + negatives))
    ]
    samples = [texts[n::count] for n in range(count)]
    return rows_of(samples)


def rows_of(samples, scores=None):
    """Return token rows for `samples`. Each is a list of texts (lists of ids): the
    anchor, the positive and the negatives."""
    ids = [[number for text in texts for number in text] for texts in samples]
    lengths = [[len(text) for text in texts] for texts in samples]
    table = {"input_ids": ids, "sequence_lengths": lengths}
    lists = {name: pa.array(v, pa.list_(pa.int32())) for name, v in table.items()}
    return TokenRows(
        pa.table({**lists, **({} if scores is None else {"labels": scores})})
    )


def pair_job(folder, *, family="bert", negatives=0, model=None, config=None, **train):
    """Return a job with five steps of 32 pairs."""
    options = {
        "global_batch_size": PAIRS,
        "token_budget": "auto",
        "weight_decay": 0.0,
        "max_grad_norm": None,
        "max_steps": 5,
        "log_every": 1,
        "evaluate_every": None,
        "learning_rate": 1e-2,
    }
    job = make_job(folder, **(options | train))
    given = job.settings.model_dump(mode="json")
    given["model"] = {
        "task": "embedding",
        "config": {"model_type": family, **CONFIGS[family], **(config or NO_DROPOUT)},
        "temperature": TEMPERATURE,
        **(model or {}),
    }
    rows = {"train": 4 * PAIRS, "validation": 30, "test": 31}
    splits = {
        name: pair_rows(count, negatives, seed)
        for seed, (name, count) in enumerate(rows.items())
    }
    return replace(job, settings=parse_settings(given), label_names=(), **splits)


def texts_of(rows, row_ids):
    """Return the ids of all texts as lists (N, texts)."""
    members, numbers = rows.sequences(np.asarray(row_ids))
    views = [view.tolist() for view in members.views(numbers)]
    counts = [len(own) for own in rows.views(np.asarray(row_ids), "sequence_lengths")]
    ends = np.cumsum(counts).tolist()
    return [views[end - n : end] for end, n in zip(ends, counts, strict=True)]


def plain_vectors(model, texts, pooling):
    """Return vectors (n, hidden) of single texts, computed by transformers."""
    found = []
    for ids in texts:
        states = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        by = {"mean": states.mean(0), "first": states[0], "last": states[-1]}
        found.append(by[pooling])
    return torch.stack(found)


def ranking_loss(anchors, positives, negatives=None):
    """Return the MultipleNegativesRankingLoss of sentence-transformers for vectors (N,
    H)."""
    passages = positives if negatives is None else torch.cat([positives, negatives])
    scores = F.normalize(anchors, dim=1) @ F.normalize(passages, dim=1).T / TEMPERATURE
    return F.cross_entropy(scores, torch.arange(len(anchors)))


def plain_loss(model, samples, pooling="mean"):
    """Return the mean over the samples, which all have the same number of texts."""
    sides = [plain_vectors(model, side, pooling) for side in zip(*samples, strict=True)]
    anchors, positives, *negatives = sides
    return ranking_loss(anchors, positives, torch.cat(negatives) if negatives else None)


def labels_of(samples):
    """Return labels (K, 3) for all texts, sample by sample."""
    found = [
        [number, place, hash(text) >> 4]
        for number, texts in enumerate(samples)
        for place, text in enumerate(texts)
    ]
    return torch.tensor(found)


def task_of(**model):
    config = {"model_type": "bert"}
    given = {"temperature": TEMPERATURE, "config": config, **model}
    return make_task(ModelSettings(task="embedding", **given))


@pytest.mark.parametrize("sizes", [[], [8], [16, 8, 4]])
@pytest.mark.parametrize("negatives", [0, 2])
def test_the_loss_is_that_of_sentence_transformers(negatives, sizes):
    count = 12
    torch.manual_seed(1)
    vectors = torch.randn(count, 2 + negatives, 16)
    names = [[f"{n} {place}" for place in range(2 + negatives)] for n in range(count)]
    loss = task_of(matryoshka=sizes).loss(vectors.flatten(0, 1), labels_of(names))
    expected = 0.0
    for size in sizes or [16]:
        anchors, positives, *others = vectors[..., :size].unbind(1)
        wrong = torch.cat(others) if others else None
        expected += ranking_loss(anchors, positives, wrong)
    torch.testing.assert_close(loss / count, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "others",
    [
        ("q2", "p1"),  # an equal positive
        ("q1", "p2"),  # another positive of the same anchor
        ("q2", "q1"),  # the anchor itself
    ],
)
def test_texts_that_repeat_are_no_negatives(others):
    torch.manual_seed(2)
    samples = [("q1", "p1"), others, ("q3", "p3")]
    names = sorted({name for sample in samples for name in sample})
    known = dict(zip(names, torch.randn(len(names), 16), strict=True))
    vectors = torch.stack([known[name] for sample in samples for name in sample])
    loss = task_of().loss(vectors, labels_of(samples))
    expected = torch.zeros(())
    for anchor, positive in samples:
        wrong = [p for a, p in samples if p not in (anchor, positive) and a != anchor]
        passages = torch.stack([known[name] for name in (positive, *wrong)])
        scores = F.cosine_similarity(known[anchor][None], passages) / TEMPERATURE
        expected += F.cross_entropy(scores[None], torch.tensor([0]))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)


def test_the_loss_of_scored_pairs_is_that_of_cosine_similarity():
    name = "sentence_transformers.sentence_transformer.losses"
    losses = pytest.importorskip(name)
    torch.manual_seed(1)
    vectors, scores = torch.randn(12, 2, 16), torch.linspace(-1, 1, 12)
    bits = scores.view(torch.int32).long().repeat_interleave(2)
    numbers = torch.arange(12).repeat_interleave(2)
    labels = torch.stack([numbers, torch.tensor([0, -1] * 12), bits], 1)
    theirs = losses.CosineSimilarityLoss(torch.nn.Identity())
    for sizes in ([], [16, 4]):
        expected = sum(
            theirs.compute_loss_from_embeddings(
                [*vectors[..., :size].unbind(1)], scores
            )
            for size in sizes or [16]
        )
        found = task_of(matryoshka=sizes).loss(vectors.flatten(0, 1), labels) / 12
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def trainer_of(job):
    trainer = assemble(job, set_up(job.settings.runtime))
    trainer.model.train()
    return trainer


def plain_of(job, trainer):
    """Return transformers' model with the weights of `trainer`."""
    plain = build_model(job)
    plain.load_state_dict(trainer.model.model.state_dict())
    return plain


def gradients_of(trainer):
    """Return the gradients of the first step."""
    trainer.stepper.set_scalars(trainer.data[0])
    trainer.stepper.backward(trainer.data[0])
    return gradients_in(trainer.model.model)


def gradients_in(model):
    named = model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def assert_first_step(trainer, plain, loss):
    """Compare with the loss that `plain` has for the samples of the first step."""
    found = gradients_of(trainer)
    loss.backward()
    torch.testing.assert_close(found, gradients_in(plain), **NEAR)
    assert float(trainer.stepper._loss) == pytest.approx(loss.item(), rel=1e-5)


def scored_rows(rows, seed=1):
    """Return the same pairs with a score each."""
    scores = np.random.default_rng(seed).uniform(-1, 1, len(rows))
    return rows_of(texts_of(rows, range(len(rows))), scores)


@pytest.mark.parametrize("budget", ["32 pairs", "8 pairs"])
def test_scored_pairs_learn_their_cosines(tmp_path, budget):
    job = pair_job(tmp_path, token_budget=BUDGETS[budget], batching="packed")
    names = ("train", "validation", "test")
    job = replace(job, **{name: scored_rows(getattr(job, name)) for name in names})
    trainer = trainer_of(job)
    plain = plain_of(job, trainer)
    row_ids = trainer.data.batches.rows(0)
    one, other = zip(*texts_of(job.train, row_ids), strict=True)
    vectors = [plain_vectors(plain, side, "mean") for side in (one, other)]
    scores = torch.tensor(job.train.labels_of(row_ids)).float()
    loss = F.mse_loss(F.cosine_similarity(*vectors), scores)
    assert_first_step(trainer, plain, loss)

    result = evaluate_split(trainer, job.validation)
    one, other = zip(*texts_of(job.validation, range(30)), strict=True)
    with torch.no_grad():
        plain.eval()
        vectors = [plain_vectors(plain, side, "mean") for side in (one, other)]
        cosines = F.cosine_similarity(*vectors)
    scores = job.validation.labels_of(np.arange(30))
    expected = spearmanr(cosines.numpy(), scores).statistic
    assert result.metrics == {"spearman": pytest.approx(expected, abs=1e-6)}


def test_shorter_vectors_of_scored_pairs_have_a_correlation():
    metrics, torch_rows = Retrieval([4, 2]), torch.randn(20, 4)
    scores = np.linspace(-1, 1, 10, dtype=np.float32)
    bits = scores.view(np.int32).astype(np.int64).repeat(2)
    places = np.tile([0, -1], 10)
    labels = np.stack([np.arange(10).repeat(2), places, bits], 1)
    metrics.update(torch_rows, torch.from_numpy(labels))
    found = metrics.compute()
    assert set(found) == {"spearman", "spearman_dim_4", "spearman_dim_2"}
    for size in (4, 2):
        cosines = F.cosine_similarity(torch_rows[::2, :size], torch_rows[1::2, :size])
        expected = spearmanr(cosines, scores).statistic
        assert found[f"spearman_dim_{size}"] == pytest.approx(expected, abs=1e-6)


MODELS = [("bert", "mean", 0), ("bert", "first", 1), ("qwen3", "last", 0)]
SLOW = pytest.mark.slow
CUTS = [
    pytest.param(*model, budget, marks=SLOW if budget != "8 pairs" else ())
    for model in MODELS
    for budget in BUDGETS
]


@pytest.mark.parametrize("batching", ["packed", "grouped"])
@pytest.mark.parametrize(("family", "pooling", "negatives", "budget"), CUTS)
def test_the_gradient_is_that_of_plain_pytorch(
    tmp_path, batching, budget, family, pooling, negatives
):
    job = pair_job(
        tmp_path,
        family=family,
        negatives=negatives,
        model={"pooling": pooling},
        batching=batching,
        token_budget=BUDGETS[budget],
    )
    trainer = trainer_of(job)
    limits = {"32 pairs": (1, 10), "8 pairs": (3, 20), "1 pair": (PAIRS, 100)}
    least, most = limits[budget]
    assert least <= len(trainer.data[0].micro_batches) <= most
    plain = plain_of(job, trainer)
    samples = texts_of(job.train, trainer.data.batches.rows(0))
    assert_first_step(trainer, plain, plain_loss(plain, samples, pooling))


def test_both_passes_drop_the_same(tmp_path):
    dropout = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.0}
    for batching in ("packed", "grouped"):
        job = pair_job(tmp_path, config=dropout, batching=batching, token_budget=200)
        trainer = trainer_of(job)
        seen, forward = [], trainer.model.forward

        def noted(batch, seen=seen, forward=forward):
            loss, logits = forward(batch)
            seen.append((batch[GRADIENT].dim(), logits))
            return loss, logits

        trainer.model.forward = noted
        gradients_of(trainer)
        first = [logits for dims, logits in seen if not dims]
        second = [logits for dims, logits in seen if dims]
        assert len(first) == len(second) > 1
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one, other)
        micro = trainer.data[0].micro_batches[0] | {GRADIENT: torch.zeros(())}
        assert not torch.equal(first[0], forward(micro)[1])


def test_evaluations_do_not_depend_on_how_they_are_cut(tmp_path):
    found = []
    for batching, budget in (("grouped", "auto"), ("packed", 100), ("random", 60)):
        job = pair_job(tmp_path, batching=batching, token_budget=budget)
        trainer = assemble(job, set_up(job.settings.runtime))
        found.append(evaluate_split(trainer, job.validation))
    samples = texts_of(job.validation, range(30))
    plain = plain_of(job, trainer).eval()
    with torch.no_grad():
        expected = plain_loss(plain, samples)
    for one in found:
        assert one.loss == pytest.approx(float(expected), rel=1e-5)
        assert one.metrics == pytest.approx(found[0].metrics)
        assert set(one.metrics) == {*task_of().figures} - {"loss", "spearman"}


def retrieval(samples, vectors, sizes=()):
    metrics = Retrieval(sizes)
    labels = labels_of(samples)
    texts = [text for sample in samples for text in sample]
    rows = torch.stack([torch.tensor(vectors[text]) for text in texts])
    padding = torch.zeros(1, rows.shape[1]), torch.full((1, 3), -100)
    for logits, own in ((rows[:3], labels[:3]), (rows[3:], labels[3:]), padding):
        metrics.update(logits, own)
    return metrics.compute()


VECTORS = {
    "a": [1.0, 0.0, 0.0],
    "a near": [0.9, 0.1, 0.0],
    "a far": [0.1, 0.9, 0.3],
    "b": [0.0, 1.0, 0.0],
    "b near": [0.0, 0.9, 0.5],
    "wrong": [0.99, 0.01, 0.0],
}


def test_figures_are_those_of_ranks():
    samples = [("a", "a near", "wrong"), ("b", "b near")]
    found = retrieval(samples, VECTORS)
    assert found["recall_at_1"] == 0.5  # "wrong" is closer to "a"
    assert found["recall_at_5"] == 1
    assert found["mrr_at_10"] == pytest.approx((1 / 2 + 1) / 2)
    assert found["ndcg_at_10"] == pytest.approx((1 / np.log2(3) + 1) / 2)


def test_an_anchor_has_all_its_positives_and_never_finds_itself():
    samples = [("a", "a near"), ("b", "b near"), ("a", "a far"), ("b", "a")]
    found = retrieval(samples, VECTORS)
    # a finds near, far. b finds far, near, ..., and a. a is no passage of its own.
    assert found["recall_at_10"] == 1
    ranks = {"a": (1, 2), "b": (2, 4)}
    gains = [sum(1 / np.log2(r + 1) for r in own) for own in ranks.values()]
    best = 1 + 1 / np.log2(3)
    assert found["ndcg_at_10"] == pytest.approx(sum(gains) / best / 2)
    assert found["mrr_at_10"] == pytest.approx((1 + 1 / 2) / 2)


def test_figures_of_each_size_have_names_of_their_own():
    found = retrieval([("a", "a near"), ("b", "b near")], VECTORS, sizes=(3, 2))
    assert {name for name in found if "dim" in name} == {
        f"{name}_dim_{size}" for name in found if "dim" not in name for size in (3, 2)
    }


@pytest.mark.parametrize("size", [16, 8])
def test_a_figure_of_each_size_chooses_the_best_model(tmp_path, size):
    model, metric = {"matryoshka": [16, 8]}, f"recall_at_1_dim_{size}"
    job = pair_job(tmp_path, model=model, metric=metric, evaluate_every=1)
    report = train(job, set_up(job.settings.runtime)).report.as_dict()
    name = f"validation_{metric}"
    assert report[name] == max(metrics_of(job)[name].values())
    assert objective(job.settings) == (name, True)
    job = pair_job(tmp_path, model=model, metric="recall_at_1_dim_32")
    with pytest.raises(SettingsError, match="no metric 'recall_at_1_dim_32'"):
        assemble(job, set_up(job.settings.runtime))


def test_it_trains_and_finds_what_it_learnt(tmp_path):
    job = pair_job(tmp_path, token_budget=300, max_steps=None, epochs=6)
    job = replace(job, validation=job.train, test=job.train)
    result = train(job, set_up(job.settings.runtime))
    report = result.report
    assert report.final_loss < 0.8 * report.initial_loss
    config = AutoModel.from_pretrained(result.model_folder).config
    assert (config.flatout_task, config.flatout_pooling) == ("embedding", "mean")


@pytest.mark.process
def test_two_ranks_train_as_one(tmp_path):
    options = {"token_budget": 200, "resume": "never"}
    jobs = {
        batching: pair_job(tmp_path / f"{batching} job", batching=batching, **options)
        for batching in ("packed", "grouped")
    }
    found = {name: curve for name, (curve, _) in on_two_ranks(jobs, tmp_path).items()}
    for name, job in jobs.items():
        alone = replace(job, work_folder=tmp_path / f"{name} alone")
        expected = gradients_of(trainer_of(alone))
        torch.testing.assert_close(found[name].gradients[0], expected, **NEAR)
        result = train(alone, set_up(alone.settings.runtime))
        losses = [point.loss for point in result.history]
        assert found[name].losses == pytest.approx(losses, rel=1e-4)
        assert found[name].test_loss == pytest.approx(result.report.test_loss, rel=1e-3)


def test_what_cannot_be_trained_is_refused(tmp_path):
    job = pair_job(tmp_path, global_batch_size=1)
    refused = "embedding compares the samples .* set it to at least 2"
    with pytest.raises(SettingsError, match=refused):
        assemble(job, set_up(job.settings.runtime))
    job = pair_job(tmp_path, model={"matryoshka": [16, 32]})
    with pytest.raises(ValueError, match="16 numbers, fewer than 32"):
        assemble(job, set_up(job.settings.runtime))


@pytest.mark.parametrize(
    ("content", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "first"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        (None, "mean"),
    ],
)
def test_a_checkpoint_says_how_it_pools(tmp_path, content, pooling):
    if content is not None:
        write(tmp_path / "1_Pooling" / "config.json", content)
    assert task_of(name_or_path=str(tmp_path)).pooling == pooling
    assert task_of(name_or_path=str(tmp_path), pooling="last").pooling == "last"


def test_a_prompt_that_is_not_used_is_named(tmp_path, caplog):
    about = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    write(tmp_path / "config_sentence_transformers.json", about)
    _ = task_of(name_or_path=str(tmp_path)).pooling
    assert "puts the prompt 'query: ' before each text" in caplog.text


def test_other_ways_of_pooling_are_refused(tmp_path):
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode_max_tokens": True})
    with pytest.raises(TaskError, match="pools by max"):
        _ = task_of(name_or_path=str(tmp_path)).pooling
    write(tmp_path / "modules.json", [{"type": "sentence_transformers.models.Dense"}])
    with pytest.raises(TaskError, match="a module Dense"):
        _ = task_of(name_or_path=str(tmp_path)).pooling


def test_a_pooling_that_cannot_be_fetched_is_asked_for(monkeypatch):
    monkeypatch.setattr("flatout.engine.machine.hub.answers", lambda: False)
    with pytest.raises(TaskError, match=r"set model\.pooling to mean"):
        _ = task_of(name_or_path="acme/cls-encoder").pooling
    assert task_of(name_or_path="acme/cls-encoder", pooling="first").pooling == "first"


def write(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))
