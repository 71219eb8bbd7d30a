"""`kedro run` on a file of pairs creates a folder that sentence-transformers loads."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from tests.projects import copied_conf, ran, write_environment

pytestmark = pytest.mark.process

PARAMETERS = {
    "split": {
        "anchor_column": "query",
        "positive_column": "answer",
        "negative_column": "wrong",
    },
    "model": {"task": "embedding", "matryoshka": [32, 8], "pooling": "mean"},
    "tokenize": {"max_length": 32, "vocab_size": 300},
    "train": {"global_batch_size": 32, "token_budget": 400, "max_steps": 30},
}
ANIMALS = "cat dog horse cow bird fish snake frog bear wolf".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, empty_store) -> Path:
    """The folder after a whole run and a prediction of the anchors."""
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "data").mkdir()
    shutil.copy(empty_store, folder / "data")
    chance, rows = random.Random(0), []
    for number in range(400):
        animal = chance.choice(ANIMALS)
        rows.append(
            {
                "query": f"who sees the {animal} {number}",
                "answer": f"number {number} is seen as {animal}",
                "wrong": [f"none of {number + 1000}"],
            }
        )
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "pairs.jsonl").write_text(lines)
    file = str(folder / "pairs.jsonl")
    entry = {"type": "flatout.datasets.TextFiles", "filepath": file}
    entries = {"raw_texts": entry, "predict_texts": entry}
    write_environment(conf := copied_conf(folder), "test", PARAMETERS, entries)
    asked = f"--params=data_dir={folder / 'data'},predict.text_column=query"
    pipelines = "--pipelines=split,tokenize,train,evaluate,predict,mine"
    ran("run", "--env=test", f"--conf-source={conf}", pipelines, asked)
    return folder


def test_figures_are_in_the_reports(folder):
    reports = folder / "data/08_reporting"
    trained = json.loads((reports / "train_report.json").read_text())
    found = json.loads((reports / "evaluation_report.json").read_text())
    for name in ("recall_at_1", "recall_at_10", "mrr_at_10", "ndcg_at_10"):
        assert 0 <= found[f"{name}_dim_8"] <= 1
        assert found[name] == pytest.approx(trained[f"test_{name}"], abs=1e-6)
    assert found["loss"] == pytest.approx(trained["test_loss"], rel=1e-4)
    assert found["recall_at_10"] > 0.4


def test_mined_negatives_are_no_positives(folder):
    data = folder / "data"
    found = pd.read_parquet(data / "07_model_output/triplets.parquet")
    counts = found["split"].value_counts()
    report = json.loads((data / "08_reporting/split_report.json").read_text())
    assert counts.to_dict() == report["rows_out"]
    train = found[found["split"] == "train"].explode("negative").dropna()
    assert len(train) > 100 and (train["negative"] != train["positive"]).all()
    assert list((data / "07_model_output/mine_vectors").glob("*.npy"))


def test_the_folder_has_the_modules_of_sentence_transformers(folder):
    model = folder / "data/06_models/model"
    modules = json.loads((model / "modules.json").read_text())
    assert [module["type"].rpartition(".")[2] for module in modules] == [
        "Transformer",
        "Pooling",
        "Normalize",
    ]
    pooling = json.loads((model / modules[1]["path"] / "config.json").read_text())
    assert pooling["word_embedding_dimension"] == 32
    assert [name for name, value in pooling.items() if value is True] == [
        "pooling_mode_mean_tokens"
    ]
    limit = json.loads((model / "sentence_bert_config.json").read_text())
    assert limit["max_seq_length"] == 32


def test_its_vectors_are_those_of_plain_transformers(folder):
    path = folder / "data/06_models/model"
    model = AutoModel.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    predictions = folder / "data/07_model_output/predictions.parquet"
    frame = pd.read_parquet(predictions).head(40)
    inputs = tokenizer(frame["text"].tolist(), padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    means = (states * mask).sum(1) / mask.sum(1)
    expected = torch.nn.functional.normalize(means, dim=1).numpy()
    np.testing.assert_allclose(np.stack(frame["vector"]), expected, atol=1e-5)
