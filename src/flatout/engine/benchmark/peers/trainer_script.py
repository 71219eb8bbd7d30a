"""A training with transformers' Trainer as people write it, from texts to the model.

    python -m flatout.engine.benchmark.peers.trainer_script JOB.json

Imports nothing of flatout, so that its seconds are the Trainer's alone. JOB says all
that a script would have written into it: files of rows, tokenizer, model, arguments,
and when the command was started. Leaves `result` (see `main`).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


class Clock:
    """Seconds by phase, one of which runs at any time."""

    def __init__(self, phase: str, since_s: float) -> None:
        self._phase, self._since_s = phase, since_s
        self.seconds: dict[str, float] = {}

    def enter(self, phase: str) -> str:
        """The phase that ends with it."""
        now_s, ended = time.time(), self._phase
        self.seconds[ended] = self.seconds.get(ended, 0.0) + now_s - self._since_s
        self._phase, self._since_s = phase, now_s
        return ended


def main(job: dict[str, Any]) -> None:
    """Train, evaluate both splits, save; seconds by phase go to `job["result"]`."""
    clock = Clock("imports", job["started_s"])
    import torch
    from datasets import load_dataset
    from transformers import AutoConfig, AutoTokenizer, set_seed

    set_seed(job["arguments"]["seed"])
    clock.enter("data")
    rows = load_dataset("parquet", data_files=job["rows"])
    clock.enter("model")
    tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"])
    config = AutoConfig.from_pretrained(job["config"])
    clock.enter("data")
    tokens = rows.map(
        encode,
        fn_kwargs={
            "tokenizer": tokenizer,
            "labels": job["labels"],
            "label2id": config.label2id,
            "max_length": job["max_length"],
        },
        batched=True,
        remove_columns=rows["train"].column_names,
    )
    clock.enter("model")
    model = build(job, config)
    clock.enter("first_step")
    arguments = {**job["arguments"], "bf16": job["arguments"].get("bf16", False)}
    if arguments["bf16"] is None:  # the best flags: as the device has it
        arguments["bf16"] = torch.cuda.get_device_capability()[0] >= 8
    trainer = make_trainer(job, arguments, model, tokenizer, tokens, clock)
    trainer.train()
    if job["evaluate_at_end"]:
        trainer.evaluate()
    figures = trainer.evaluate(tokens["test"])
    clock.enter("saving")
    trainer.save_model(job["model"])
    clock.enter("rest")
    found = {
        "phases_s": clock.seconds,
        "samples": trainer.seen,
        "steps": trainer.state.global_step,
        "test_loss": figures["eval_loss"],
        "test_accuracy": figures.get("eval_accuracy"),
    }
    Path(job["result"]).write_text(json.dumps(found, indent=1), encoding="utf-8")


def encode(
    batch: Any, tokenizer: Any, labels: str, label2id: Any, max_length: int
) -> Any:
    """Texts, or pairs of them, to tokens; labels to what the model's loss takes."""
    texts = [batch[name] for name in ("text", "text_pair") if name in batch]
    found = tokenizer(*texts, truncation=True, max_length=max_length)
    if labels == "class":
        found["labels"] = [label2id[name] for name in batch["label"]]
    elif labels == "number":
        found["labels"] = [float(one) for one in batch["label"]]
    elif labels == "several":
        several = [{label2id[name] for name in names} for names in batch["label"]]
        every = range(len(label2id))
        found["labels"] = [[float(n in names) for n in every] for names in several]
    return found


def build(job: dict[str, Any], config: Any) -> Any:
    """The checkpoint with a new head; from scratch where there is none."""
    import transformers

    auto = getattr(transformers, job["auto_class"])
    if job["checkpoint"] is None:
        return auto.from_config(config)
    pinned = {"revision": job["revision"]} if job["revision"] else {}
    return auto.from_pretrained(job["checkpoint"], config=config, **pinned)


def make_trainer(
    job: dict[str, Any],
    arguments: dict[str, Any],
    model: Any,
    tokenizer: Any,
    tokens: Any,
    clock: Clock,
) -> Any:
    """A Trainer that counts the samples it sees and turns the clock."""
    import transformers

    class Counted(transformers.Trainer):  # type: ignore[misc]
        seen = 0

        def training_step(self, model: Any, inputs: Any, *args: Any, **kw: Any) -> Any:
            self.seen += len(inputs["input_ids"])
            return super().training_step(model, inputs, *args, **kw)

        def evaluate(self, *args: Any, **kw: Any) -> Any:
            before = clock.enter("evaluation")
            found = super().evaluate(*args, **kw)
            clock.enter(before)
            return found

    class Steps(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            if state.global_step == 1:
                clock.enter("steps")

    language_model = job["labels"] == "tokens"
    collator = (
        transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
        if language_model
        else transformers.DataCollatorWithPadding(tokenizer)
    )
    return Counted(
        model,
        transformers.TrainingArguments(job["work"], **arguments),
        train_dataset=tokens["train"],
        eval_dataset=tokens["validation"],
        data_collator=collator,
        processing_class=tokenizer,
        compute_metrics=accuracy if job["labels"] == "class" else None,
        callbacks=[Steps()],
    )


def accuracy(predicted: Any) -> dict[str, float]:
    """Of logits (N, C) and labels (N,)."""
    logits, labels = predicted
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
