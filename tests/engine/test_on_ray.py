"""Token rows from a Ray cluster equal those from this machine, byte for byte."""

import json
import random
import sys
import threading
import time
from contextlib import suppress

import datasets
import psutil
import pytest

from flatout.engine.files.arrow_folder import write_recipe
from flatout.engine.files.content_key import file_hash
from flatout.engine.parameters import ModelSettings, TokenizeSettings
from flatout.engine.tokenizing.encoders import encode, on_ray
from flatout.engine.tokenizing.encoders.encoded import TokensError
from flatout.engine.tokenizing.encoders.on_ray import VERSIONS, encode_part
from flatout.engine.tokenizing.token_recipes import tokens_recipe
from tests.make import saved_tokenizer

MODEL = ModelSettings(config={"model_type": "bert", "max_position_embeddings": 64})
TOKENIZE = TokenizeSettings(max_length=16, vocab_size=300)
WORDS = [f"word{number}" for number in range(500)]
KILLS = 3


def rows_of(count: int) -> datasets.Dataset:
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 30))) for _ in range(count)]
    return datasets.Dataset.from_dict({"text": texts})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return saved_tokenizer(folder, rows_of(300), MODEL, TOKENIZE)


def recipe_of(tokenizer, rows, engine="ray", model=MODEL, **tokenize):
    settings = TOKENIZE.model_copy(update={"engine": engine, **tokenize})
    return tokens_recipe("train_tokens", rows, tokenizer, [], model, settings)


@pytest.fixture(scope="module")
def cluster():
    """A cluster of two nodes with one core each."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    nodes = Cluster()
    for _ in range(2):
        nodes.add_node(num_cpus=1, include_dashboard=False, object_store_memory=2**28)
    ray.init(address=nodes.address, log_to_driver=False)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def written(folder, recipe) -> dict[str, str]:
    write_recipe(folder, recipe)
    return {path.name: file_hash(path) for path in folder.iterdir()}


def of_pairs(count):
    rows = rows_of(count)
    return rows.add_column("passages", [[text, "another"] for text in rows["text"]])


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (rows_of, {}),
        (rows_of, {"join_texts": True, "model": "causal-lm"}),
        (of_pairs, {"model": "embedding"}),
    ],
    ids=["texts", "joined", "pairs"],
)
def test_every_form_has_the_bytes_of_the_local_engine(
    tokenizer, cluster, tmp_path, monkeypatch, rows, options
):
    monkeypatch.setattr(encode, "UNIT_BYTES", 20_000)
    task = options.pop("model", MODEL.task)
    options["model"] = MODEL.model_copy(update={"task": task})
    made = [
        written(tmp_path / engine, recipe_of(tokenizer, rows(3_000), engine, **options))
        for engine in ("local", "ray")
    ]
    assert made[0] == made[1]


def workers() -> list[psutil.Process]:
    """Return the workers of this test's cluster that are encoding at the moment."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.name().startswith("ray::encode"):
                found.append(process)
    return found


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.process
def test_killed_workers_cost_only_their_parts(tokenizer, cluster, tmp_path):
    rows, draw, killed = rows_of(200_000), random.Random(1), []
    begin_s = time.perf_counter()
    local = written(tmp_path / "local", recipe_of(tokenizer, rows, "local"))
    local_s = time.perf_counter() - begin_s
    begin_s = time.perf_counter()
    assert written(tmp_path / "undisturbed", recipe_of(tokenizer, rows)) == local
    ray_s = time.perf_counter() - begin_s
    print(f"local {local_s:.1f} s, Ray {ray_s:.1f} s")  # noqa: T201

    def kill() -> None:
        while len(killed) < KILLS:
            time.sleep(draw.uniform(0.2, 0.6))
            for process in draw.sample(found := workers(), min(1, len(found))):
                with suppress(psutil.Error):
                    process.kill()
                    killed.append(process.pid)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    assert written(tmp_path / "killed", recipe_of(tokenizer, rows)) == local
    assert len(killed) == KILLS


@pytest.mark.slow
@pytest.mark.process
def test_rows_that_cannot_be_encoded_are_named(tokenizer, cluster):
    messages = [json.dumps([{"role": "user", "content": "a"}])]
    rows = datasets.Dataset.from_dict({"messages": messages})
    model = MODEL.model_copy(update={"task": "causal-lm"})
    with pytest.raises(TokensError, match="needs a tokenizer with a chat template"):
        recipe_of(tokenizer, rows, model=model).to_dataset()


def test_a_worker_of_another_version_is_refused(tokenizer):
    wanted = {**VERSIONS, "tokenizers": "0.1"}
    with pytest.raises(TokensError, match="a worker of the Ray cluster has"):
        encode_part((), recipe_of(tokenizer, rows_of(1)).options, wanted, None, 0)


@pytest.mark.parametrize("fault", ["no package", "no cluster"])
def test_a_cluster_that_cannot_be_used_is_told_of(tokenizer, monkeypatch, fault):
    if fault == "no package":
        monkeypatch.setitem(sys.modules, "ray", None)
    else:
        ray = pytest.importorskip("ray")
        monkeypatch.setattr(ray, "is_initialized", lambda: False)

        def gone(**_):
            raise ConnectionError("no cluster at RAY_ADDRESS")

        monkeypatch.setattr(ray, "init", gone)
    with pytest.raises(TokensError, match=r"Ray cannot be used .*engine: local"):
        list(recipe_of(tokenizer, rows_of(3)).batches())


def test_the_engine_is_no_part_of_the_key(tokenizer):
    rows = rows_of(3)
    keys = [recipe_of(tokenizer, rows, engine).key for engine in ("local", "ray")]
    assert keys[0].digest == keys[1].digest
    assert on_ray.RETRIES > KILLS
