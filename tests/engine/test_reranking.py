"""Passages ranked for queries: columns, metrics, training, and a folder that
`CrossEncoder` loads."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import average_precision_score, ndcg_score
from transformers import AutoConfig, AutoTokenizer

from flatout.engine.data.raw_texts import RawTextsError
from flatout.engine.data.split import SplitError
from flatout.engine.machine.runtime import set_up
from flatout.engine.models.building import Vocabulary, load_pretrained
from flatout.engine.models.model_files import save_sentence_files
from flatout.engine.parameters import SettingsError, parse_settings
from flatout.engine.predict.predicting import predict
from flatout.engine.predict.predictor import Predictor
from flatout.engine.rows.rows import rows_from_dataset
from flatout.engine.tasks._shared.ranking import Ranking, ranking_figures
from flatout.engine.tokenizing.token_recipes import split_recipes
from flatout.engine.tokenizing.tokenizer import TokenizerFile
from flatout.engine.train.loop import train
from tests.engine.families import CONFIGS
from tests.engine.runs import make_job
from tests.make import saved_tokenizer, text_recipes

TASK = "reranking"
COLUMNS = {"query_column": "q", "passage_column": "p", "label_column": "y"}
ANIMALS = "cat dog horse cow bird fish snake frog bear wolf".split()
MAX_LENGTH = 24
SPLITS = ("train", "validation", "test")


def frame_of(queries: int, passages: int = 5) -> pd.DataFrame:
    """Return queries with passages, of which only the first is relevant."""
    chance, rows = np.random.default_rng(0), []
    for number in range(queries):
        names = chance.choice(ANIMALS, passages, replace=False)
        for place, name in enumerate(names):
            passage = f"some people {'never ' if place else ''}saw a {name}"
            rows.append((f"who saw the {names[0]} {number}", passage, int(not place)))
    return pd.DataFrame(rows, columns=["q", "p", "y"])


def split(frame: pd.DataFrame, task: str = TASK, **options):
    options = {"max_rejected_fraction": 1, **COLUMNS, **options}
    return text_recipes(frame, task, **options)


def test_all_rows_of_a_query_are_in_one_split_and_bad_ones_are_rejected():
    frame = frame_of(100).astype({"y": float})
    frame.loc[[3, 14, 25], "y"] = [3.0, -1.0, math.nan]
    frame.loc[36, "p"] = " "
    made = split(frame)
    queries = [set(made[f"{name}_rows"].to_dataset()["text"]) for name in SPLITS]
    assert sum(map(len, queries)) == len(set.union(*queries)) == 100
    rejected = made["rejected_rows"].table().to_pylist()
    fault = "y is not between 0 and 1: divide all by the largest"
    assert {one["row"]: one["reason"] for one in rejected} == {
        3: fault,
        14: fault,
        25: rejected[2]["reason"],
        36: "p is empty",
    }


def test_data_that_is_too_small_is_counted_in_queries():
    frame = frame_of(2, passages=10)
    count = frame["q"].nunique()
    with pytest.raises(SplitError, match=rf": {count} values of the column q are too"):
        split(frame)["train_rows"].to_dataset()


def test_columns_that_do_not_fit_are_named():
    with pytest.raises(
        RawTextsError, match=r"split\.passage_column is 'x', which is not"
    ):
        split(frame_of(10), passage_column="x")
    with pytest.raises(RawTextsError, match=r"set split\.query_column and"):
        split(frame_of(10), query_column=None, passage_column=None)
    with pytest.raises(RawTextsError, match=r"second text is split\.passage"):
        split(frame_of(10), text_pair_column="p")
    with pytest.raises(RawTextsError, match=r"needs labels: set split\.label_column"):
        split(frame_of(10), label_column=None)
    with pytest.raises(SettingsError, match=r"for model\.task: reranking, not regress"):
        split(frame_of(10), task="regression")
    with pytest.raises(SettingsError, match="query_column and passage_column go"):
        parse_settings({"split": {"query_column": "q"}})


def test_figures_are_those_of_scikit_learn():
    chance = np.random.default_rng(4)
    queries = np.sort(chance.integers(0, 40, 600))
    labels = (chance.random(600) < 0.2).astype(np.float32)
    labels[queries == 7] = 0  # queries without a relevant passage are ignored
    scores = chance.normal(size=600).astype(np.float32)
    found, parts = Ranking(), chance.permutation(600)
    for rows in np.array_split(parts, 4):
        both = np.stack([labels[rows], queries[rows]], 1).astype(np.float32)
        found.update(torch.tensor(scores[rows, None]), torch.tensor(both))
    found.update(torch.zeros(2, 1), torch.full((2, 2), math.nan))
    expected = {"mrr_at_10": [], "ndcg_at_10": [], "average_precision": []}
    for query in set(queries.tolist()) - {7}:
        own = queries == query
        y, s = labels[own], scores[own]
        if not y.any():
            continue
        rank = 1 + int(np.argmax(y[np.argsort(-s)]))
        expected["mrr_at_10"].append(1 / rank if rank <= 10 else 0)
        expected["ndcg_at_10"].append(ndcg_score([y], [s], k=10))
        expected["average_precision"].append(average_precision_score(y, s))
    means = {name: np.mean(values) for name, values in expected.items()}
    assert found.compute() == pytest.approx(means, rel=1e-6)


def test_equal_scores_are_no_advantage():
    labels, queries = np.array([1.0, 0, 0, 0]), np.zeros(4)
    found = ranking_figures(np.zeros(4), labels, queries)
    assert found == pytest.approx(
        {"mrr_at_10": 1 / 4, "ndcg_at_10": 1 / np.log2(5), "average_precision": 1 / 4}
    )
    assert ranking_figures(np.zeros(4), np.zeros(4), queries) == {}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The job, its result, and the model's folder with its tokenizer."""
    folder = tmp_path_factory.mktemp(TASK)
    split_rows = split(frame_of(300))
    rows = {name: split_rows[f"{name}_rows"].to_dataset() for name in SPLITS}
    config = {"model_type": "bert", **CONFIGS["bert"]}
    steps = {"epochs": 4, "global_batch_size": 32, "learning_rate": 3e-3}
    job = make_job(folder, **steps, token_budget=400)
    given = job.settings.model_dump(mode="json")
    given |= {"model": {"task": TASK, "config": config}}
    given["tokenize"] |= {"vocab_size": 100}
    settings = parse_settings(given)
    own = settings.model, settings.tokenize
    file = saved_tokenizer(folder / "tokenizer", rows["train"], *own)
    made = split_recipes(rows, file, [], settings.model, settings.tokenize)
    tokens = [rows_from_dataset(recipe.to_dataset()) for recipe in made]
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    job = replace(
        job,
        settings=settings,
        label_names=(),
        vocabulary=Vocabulary.of(tokenizer),
        **dict(zip(SPLITS, tokens, strict=True)),
    )
    result = train(job, set_up(settings.runtime))
    config = AutoConfig.from_pretrained(result.model_folder)
    tokenizer.save_pretrained(result.model_folder)
    save_sentence_files(config, result.model_folder, MAX_LENGTH)
    return job, result


def test_it_learns_to_rank(trained):
    job, result = trained
    report = result.report.as_dict()
    assert report["test_loss"] < 0.5
    assert report["test_ndcg_at_10"] > 0.75
    model = load_pretrained(result.model_folder)
    file = TokenizerFile(result.model_folder)
    found = Predictor(model, file, job.settings).evaluate(job.test)
    for name in ("mrr_at_10", "ndcg_at_10", "average_precision"):
        assert found.metrics[name] == pytest.approx(report[f"test_{name}"], abs=1e-6)


def test_a_cross_encoder_has_its_scores_and_its_loss(trained):
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    job, result = trained
    frame = frame_of(20)
    frame.loc[:49, "q"] += " and what else did they see" * 4  # cut
    split_of = {"split": COLUMNS, "tokenize": {"max_length": MAX_LENGTH}}
    given = {**job.settings.model_dump(mode="json"), **split_of}
    folder = result.model_folder
    settings, model = parse_settings(given), load_pretrained(folder)
    made = predict(model, TokenizerFile(folder), frame, settings)
    scores = np.concatenate([b.column("score").to_numpy() for b in made.batches()])
    theirs = CrossEncoder(str(folder), device="cpu")
    pairs = list(zip(frame["q"], frame["p"], strict=True))
    np.testing.assert_allclose(scores, theirs.predict(pairs), atol=1e-5)
    assert scores.std() > 0.05

    labels = torch.linspace(0, 1, len(scores))
    logits = torch.tensor(scores).logit()[:, None]
    both = torch.stack([labels, torch.zeros(len(scores))], 1)
    loss = job.task.loss(logits, both) / len(scores)
    expected = BinaryCrossEntropyLoss(theirs)(
        [list(frame["q"]), list(frame["p"])], labels
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
