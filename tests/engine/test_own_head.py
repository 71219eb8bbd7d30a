"""A task with a custom head and loss: texts of the same class have similar vectors."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel

from flatout.engine.batches.global_batches import GlobalBatches
from flatout.engine.machine.runtime import set_up
from flatout.engine.parameters import SettingsError
from flatout.engine.tasks import Metrics
from flatout.engine.tasks.sequence_classification import SequenceClassification
from flatout.engine.train import evaluate as evaluating
from flatout.engine.train.evaluate import evaluate
from flatout.engine.train.loop import train
from flatout.engine.train.setup.assemble import assemble, build_model
from tests.engine.runs import NO_DROPOUT, changed, make_job


class Near(SequenceClassification):
    """Cosine similarity of each text to all others in its global batch."""

    auto_class = "AutoModel"
    architectures = ("Model",)
    whole_batch = True
    figures: ClassVar = {"loss": False}

    def head(self, model, states):
        """Return vectors (K, hidden) of length 1."""
        return F.normalize(states.float(), dim=-1)

    def loss(self, logits, labels):
        """Return the cross entropy of finding texts of the same class among all
        others."""
        alone = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
        scores = (logits @ logits.T / 0.1).masked_fill(alone, -1e4).log_softmax(-1)
        same = (labels[:, None] == labels) & ~alone
        return -((scores * same).sum(1) / same.sum(1).clamp(min=1)).sum()

    def hits(self, logits, labels):
        """Return None, because no output is right or wrong."""
        return None

    def metrics(self, device):
        """Return None, because the loss is the only metric."""
        return None

    def chance_loss(self, num_outputs):
        """Return None, because the value depends on the data."""
        return None


class Table(Metrics):
    """A metric that is not a number, which version 0.1 allowed."""

    def update(self, logits, labels):
        """Ignore the outputs."""

    def compute(self):
        """Return the counts of two classes."""
        return {"confusion": [[3, 1], [0, 4]]}


class Confused(Near):
    """A task with a table among its metrics."""

    def metrics(self, device):
        """Return the table."""
        return Table()


PATH = f"{__name__}.Near"


def near_job(folder, path=PATH, **train):
    options = {"token_budget": "auto", "epochs": 4, **train}
    job = make_job(folder, config=NO_DROPOUT, **options)
    return changed(job, model={"task": path})


def seeded_model(job):
    torch.manual_seed(job.settings.runtime.seed)
    return build_model(job)


def plain_vectors(model, rows, row_ids):
    """Return the vector of each row alone, computed by transformers."""
    ids = [torch.tensor([view.tolist()]) for view in rows.views(row_ids)]
    states = [model(input_ids=one).last_hidden_state[:, 0] for one in ids]
    return F.normalize(torch.cat(states), dim=-1)


UNCLIPPED = {"weight_decay": 0.0, "max_grad_norm": None}


@pytest.fixture(scope="module")
def plain_losses(tmp_path_factory):
    """The losses of ten steps."""
    job, losses = near_job(tmp_path_factory.mktemp("plain"), **UNCLIPPED), []
    plain = seeded_model(job)
    assert type(plain).__name__ == "BertModel"
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    batches = GlobalBatches(len(job.train), 16, job.settings.runtime.seed)
    for row_ids in map(batches.rows, range(10)):
        labels = torch.tensor(job.train.labels_of(row_ids))
        vectors = plain_vectors(plain, job.train, row_ids)
        loss = job.task.loss(vectors, labels) / len(row_ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize(
    ("batching", "budget"),
    [
        *((name, "auto") for name in ("packed", "random")),
        *((name, 60) for name in ("packed", "grouped", "fixed")),
    ],
)
def test_ten_steps_equal_plain_pytorch(tmp_path, batching, budget, plain_losses):
    job = near_job(tmp_path, batching=batching, **UNCLIPPED, token_budget=budget)
    trainer = assemble(job, set_up(job.settings.runtime))
    for step, expected in enumerate(plain_losses):
        batch = trainer.data[step]
        assert budget == "auto" or len(batch.micro_batches) > 1
        trainer.stepper(batch)
        found = trainer.stepper.sums.last_loss
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_evaluations_compare_rows_however_they_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluating, "COMPARED_ROWS", 16)
    job = near_job(tmp_path)
    trainer = assemble(job, set_up(job.settings.runtime))
    model, data = trainer.model, trainer.data
    planner = replace(data.planner, token_budget=60)
    given = (planner, data.collator, trainer.runtime)
    found = evaluate(model, job.validation, *given)
    plain, total = seeded_model(job).eval(), 0.0
    for row_ids in (range(16), range(16, 20)):
        rows = torch.tensor(row_ids).numpy()
        labels = torch.tensor(job.validation.labels_of(rows))
        with torch.no_grad():
            vectors = plain_vectors(plain, job.validation, rows)
        total += float(job.task.loss(vectors, labels))
    assert found.loss == pytest.approx(total / 20, rel=1e-5)


def test_it_trains_and_its_model_loads_in_transformers(tmp_path):
    result = train(near_job(tmp_path), set_up(make_job(tmp_path).settings.runtime))
    assert result.report.final_loss < result.report.initial_loss
    assert type(AutoModel.from_pretrained(result.model_folder)).__name__ == "BertModel"


def test_metrics_that_are_no_numbers_are_refused_before_training(tmp_path):
    job = near_job(tmp_path, f"{__name__}.Confused")
    match = r"Confused have confusion: \[\[3, 1\], \[0, 4\]\]: give a number"
    with pytest.raises(SettingsError, match=match):
        train(job, set_up(job.settings.runtime))
    assert not list(job.work_folder.glob("*/*.safetensors"))
