"""The model that a training run saves and returns: custom code, caches and experts."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kedro.io import DatasetError
from transformers import AutoModelForCausalLM

from flatout.datasets import TransformersModel
from flatout.engine.launch.launch import run_job
from flatout.engine.models.building import ModelError, load_pretrained
from flatout.engine.parameters import ModelSettings, SettingsError, parse_settings
from flatout.engine.train.setup.job import TrainJob
from tests.engine.families import CONFIGS
from tests.engine.remote_code import write_model
from tests.engine.runs import make_job, metrics_of
from tests.make import task_rows

EXPERTS = {**CONFIGS["llama"], "num_local_experts": 2, "num_experts_per_tok": 1}


def job_of(folder, model: ModelSettings) -> TrainJob:
    """Return the job of `make_job` with this model."""
    job = make_job(folder)
    settings = job.settings.model_copy(update={"model": model})
    return replace(job, settings=settings, **task_rows(model.task))


def test_a_model_of_its_own_code_is_trained_to_the_end(tmp_path):
    """The test loss is that of the returned model, computed row by row."""
    folder = str(write_model(tmp_path / "own"))
    model = ModelSettings(name_or_path=folder, trust_remote_code=True)
    job = job_of(tmp_path, model)
    result = run_job(job)
    assert type(result.model).__name__ == "OwnForSequenceClassification"
    losses = []
    for ids, label in zip(*job.test.table.to_pydict().values(), strict=True):
        inputs = torch.tensor([ids])
        logits = result.model(inputs, torch.ones_like(inputs)).logits
        losses.append(F.cross_entropy(logits, torch.tensor([label])).item())
    [reported] = metrics_of(job)["test_loss"].values()
    assert reported == pytest.approx(sum(losses) / 21, rel=1e-5)
    saved = result.model_folder
    assert {path.name for path in saved.iterdir()} == {
        *("config.json", "model.safetensors", "own_model.py")
    }
    with pytest.raises(ModelError, match="set trust_remote_code: true"):
        load_pretrained(saved)


def test_code_from_a_folder_runs_only_where_it_is_trusted(tmp_path):
    folder = write_model(tmp_path / "own")
    distrusted = ModelSettings(name_or_path=str(folder))
    with pytest.raises(ModelError, match="contains custom code"):
        run_job(job_of(tmp_path, distrusted))
    entry = {"filepath": str(folder)}
    with pytest.raises(
        DatasetError, match=r"trust_remote_code: true \(load_args of this entry"
    ):
        TransformersModel(**entry).load()
    loaded = TransformersModel(**entry, load_args={"trust_remote_code": True}).load()
    assert type(loaded).__name__ == "OwnForSequenceClassification"


def test_code_of_another_repository_is_not_pinned_by_a_folder(tmp_path):
    folder = write_model(tmp_path / "own")
    config = folder / "config.json"
    config.write_text(config.read_text().replace("own_model.", "org/name--own_model."))
    given = {"name_or_path": str(folder), "trust_remote_code": True, "revision": "1"}
    with pytest.raises(SettingsError, match="names code of another repository"):
        parse_settings({"model": given})


@pytest.mark.parametrize(
    ("family", "config"), [("llama", CONFIGS["llama"]), ("mixtral", EXPERTS)]
)
def test_a_saved_language_model_generates_with_its_cache(tmp_path, family, config):
    """The best model is also restored if it is saved under other names."""
    model = ModelSettings(task="causal-lm", config={"model_type": family, **config})
    job = job_of(tmp_path, model)
    result = run_job(job)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((result.model_folder / name).read_text())["use_cache"] is True
    saved = AutoModelForCausalLM.from_pretrained(result.model_folder)
    total = count = 0
    for ids in job.test.table["input_ids"].to_pylist():
        inputs = torch.tensor([ids])
        logits = saved(inputs).logits[0, :-1]
        total += F.cross_entropy(logits, inputs[0, 1:], reduction="sum").item()
        count += len(ids) - 1
    [reported] = metrics_of(job)["test_loss"].values()
    assert reported == pytest.approx(total / count, rel=1e-5)
    widths = []
    embeddings = saved.get_input_embeddings()
    embeddings.register_forward_hook(
        lambda _m, given, _o: widths.append(given[0].shape[1])
    )
    saved.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, min_new_tokens=4)
    assert widths == [3, 1, 1, 1]
