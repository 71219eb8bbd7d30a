"""A typical training script with transformers' Trainer, from texts to the saved model.

    python -m benchmarks.trainer_script JOB.json

It imports nothing from flatout, so that only the Trainer's time is measured. JOB
contains the settings that a user would write into the script.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> None:
    """Train, evaluate and save the model. The test accuracy and the number of training
    samples are written to the file `job["result"]`."""
    import torch
    import transformers
    from datasets import load_dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    transformers.set_seed(job["seed"])
    rows = load_dataset("csv", data_files=job["rows"])["train"]
    labels = sorted(set(rows["label"]))
    numbers = {name: number for number, name in enumerate(labels)}
    tokenizer = AutoTokenizer.from_pretrained(job["checkpoint"])

    def encode(batch: Any) -> Any:
        found = tokenizer(batch["text"], truncation=True, max_length=job["max_length"])
        found["labels"] = [numbers[name] for name in batch["label"]]
        return found

    tokens = rows.map(encode, batched=True, remove_columns=rows.column_names)
    parts = tokens.train_test_split(test_size=0.2, seed=job["seed"])
    held_out = parts["test"].train_test_split(test_size=0.5, seed=job["seed"])
    model = AutoModelForSequenceClassification.from_pretrained(
        job["checkpoint"], num_labels=len(labels)
    )
    cuda = torch.cuda.is_available()
    arguments = transformers.TrainingArguments(
        job["work"],
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=job["seed"],
        use_cpu=not cuda,
        **{**job["arguments"], "bf16": cuda and job["arguments"].get("bf16", False)},
    )
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=parts["train"],
        eval_dataset=held_out["train"],
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
    )
    trainer.train()
    found = trainer.evaluate(held_out["test"])
    trainer.save_model(job["model"])
    told = {"test_accuracy": found["eval_accuracy"], "samples": len(parts["train"])}
    Path(job["result"]).write_text(json.dumps(told), encoding="utf-8")


def accuracy(predicted: Any) -> dict[str, float]:
    """Return the accuracy of logits (N, C) and labels (N,)."""
    logits, labels = predicted
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
