"""The Hugging Face Trainer as a contender, at default flags and at its best ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flatout.engine.benchmark.peers.clock import PeerClock
from flatout.engine.benchmark.peers.flags import (
    check_optimisation,
    flags_of,
    parts_of,
    total_steps,
)
from flatout.engine.benchmark.peers.flattened import (
    FLATTENED,
    flattening_collator,
    samples_of,
)
from flatout.engine.benchmark.peers.samples import (
    OnDevice,
    RowNumbers,
    SampleCollator,
)
from flatout.engine.families import family_of
from flatout.engine.machine.runtime import Runtime
from flatout.engine.models.model import TaskModel
from flatout.engine.rows.vocabulary import Vocabulary
from flatout.engine.train.evaluate import evaluate
from flatout.engine.train.recording.report import Evaluation
from flatout.engine.train.setup.assemble import build_model
from flatout.engine.train.setup.job import TrainJob, check_rows
from flatout.engine.train.setup.resolved_config import resolve
from flatout.engine.train.setup.step_data import make_collator, make_planner

NOT_SPEED = frozenset(
    {
        *("output_dir", "seed", "max_steps", "report_to", "disable_tqdm"),
        "remove_unused_columns",
    }
)


def train_with_trainer(
    job: TrainJob,
    runtime: Runtime,
    name: str,
    folder: Path,
    timing: Mapping[str, Any],
) -> dict[str, Any]:
    """Train with the contender's flags; the same seed gives the same first weights.
    `timing`: rules of the clock."""
    check_rows(job)
    job.task.trainer_collator(None)  # refuses before anything is built
    check_optimisation(job)
    model, flags = _built(job), flags_of(name, job, runtime)
    judge = _judge(job, runtime, model)
    clock = PeerClock(runtime, total_steps(job), judge, **timing)
    fed = _fed(model, job)
    if "flattened" in parts_of(name):
        fed["data_collator"] = flattening_collator(job, model)
        model.set_attn_implementation(FLATTENED)
    trainer = _trainer(fed, flags, folder, clock)
    clock.start()
    trainer.train()
    shown = {k: v for k, v in flags.items() if k not in NOT_SPEED}
    if "flattened" in parts_of(name):
        shown["data_collator"] = "DataCollatorWithFlattening"
    attends = family_of(model.config).attends
    return {
        **clock.figures(),
        "flags": shown,
        "strategy": flags.get("train_sampling_strategy", "random"),
        "attention": model.config._attn_implementation if attends else "none",
        "compile": flags.get("torch_compile", False),
        "cuda_graphs": False,
        "num_workers": flags.get("dataloader_num_workers", 0),
    }


def _built(job: TrainJob) -> Any:
    """As transformers builds it, with PyTorch's attention where it has any."""
    model = build_model(job)
    if family_of(model.config).attends:
        model.set_attn_implementation("sdpa")
    return model


def _judge(job: TrainJob, runtime: Runtime, model: Any) -> Any:
    """The engine's own evaluation, on padded batches, of a copy: the engine's forward
    pass changes the modules it runs."""
    settings = job.settings
    padded = settings.model_copy(
        update={
            "train": settings.train.model_copy(
                update={"batching": "grouped", "cuda_graphs": False}
            ),
            "runtime": settings.runtime.model_copy(update={"attention": "sdpa"}),
        }
    )
    padded_job = replace(job, settings=padded)
    resolved = resolve(padded_job, runtime, model.config)
    planner = make_planner(padded, runtime, resolved)
    collator = make_collator(padded_job, runtime, resolved, model.config)
    copy = _built(job)
    task_model = TaskModel(copy, job.task, settings.max_length)

    def judge() -> Evaluation:
        copy.load_state_dict(model.state_dict())
        task_model.to(runtime.device)
        found = evaluate(task_model, job.validation, planner, collator, runtime)
        task_model.to("cpu")
        return found

    return judge


def _trainer(
    fed: dict[str, Any], flags: dict[str, Any], folder: Path, clock: PeerClock
) -> Any:
    import transformers

    class Counted(transformers.Trainer):  # type: ignore[misc]
        """Counts the samples that really pass."""

        seen = 0

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            # Else layers that are alike would be compiled one by one: 28 of Qwen3-0.6B
            # took over 240 s.
            self.accelerator.state.dynamo_plugin.use_regional_compilation = True

        def training_step(self, model: Any, inputs: Any, *args: Any, **kw: Any) -> Any:
            self.seen += samples_of(inputs)
            return super().training_step(model, inputs, *args, **kw)

    class Clocked(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            if clock.step_done(trainer.seen):
                control.should_training_stop = True
            trainer.seen = 0

    trainer = Counted(
        args=transformers.TrainingArguments(
            output_dir=str(folder / "trainer"), **flags
        ),
        callbacks=[Clocked()],
        **fed,
    )
    return trainer


def _fed(model: Any, job: TrainJob) -> dict[str, Any]:
    """The model, the rows of train, and what collates them, as the Trainer has them."""
    if job.vocabulary is None:
        return {
            "model": OnDevice(model, job.task),
            "train_dataset": RowNumbers(len(job.train)),
            "data_collator": SampleCollator(job),
        }
    from datasets import Dataset
    from transformers import DataCollatorWithPadding

    tokenizer = _padding_tokenizer(job.vocabulary)
    own = job.task.trainer_collator(tokenizer)
    return {
        "model": model,
        "train_dataset": Dataset(job.train.table.replace_schema_metadata()),
        "data_collator": own or DataCollatorWithPadding(tokenizer),
    }


def _padding_tokenizer(vocabulary: Vocabulary) -> Any:
    """A tokenizer that can do nothing but pad."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    pieces = {"[PAD]": vocabulary.pad_token_id}
    tokenizer = Tokenizer(models.WordLevel(pieces, unk_token="[PAD]"))  # noqa: S106
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")  # noqa: S106
