# ruff: noqa: T201
"""A classifier of texts by transformers' Trainer, as people write it.

    python tests/tools/trainer_script.py FOLDER [--flags] [--epochs 5] [--max-steps 1]

FOLDER has job.csv (text, label) and a checkpoint with its tokenizer; the model goes to
FOLDER/trainer_model. Its last line but one says how long it trained and evaluated; with
--first-step it ends behind that. Imports nothing of this project: its time is the
Trainer's alone.
"""

import argparse
import os
import time

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--flags", action="store_true", help="for speed")
parser.add_argument("--epochs", type=float, default=5)
parser.add_argument("--max-steps", type=int, default=-1)
parser.add_argument("--first-step", action="store_true")
given = parser.parse_args()

rows = load_dataset("csv", data_files=f"{given.folder}/job.csv")["train"]
rows = rows.class_encode_column("label")
labels = rows.features["label"].num_classes
train, rest = rows.train_test_split(0.2, seed=0).values()
validation, test = rest.train_test_split(0.5, seed=0).values()
checkpoint = f"{given.folder}/checkpoint"
tokenizer = AutoTokenizer.from_pretrained(checkpoint)


def tokens(split):
    def encode(batch):
        return tokenizer(batch["text"], truncation=True, max_length=128)

    return split.map(encode, batched=True, remove_columns=["text"])


def accuracy(predicted):
    return {"accuracy": (predicted[0].argmax(-1) == predicted[1]).mean().item()}


class FirstStep(TrainerCallback):
    def on_step_end(self, *_, **__):
        os._exit(0)


gpu = torch.cuda.is_available()
flags = {
    "bf16": gpu,
    "tf32": gpu,
    "optim": "adamw_torch_fused",
    "dataloader_num_workers": 4,
    "dataloader_persistent_workers": True,
    "train_sampling_strategy": "group_by_length",
    "logging_steps": 50,
}
trainer = Trainer(
    AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=labels),
    TrainingArguments(
        f"{given.folder}/trainer",
        num_train_epochs=given.epochs,
        max_steps=given.max_steps,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=128,
        learning_rate=5e-5,
        save_strategy="no",
        eval_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        **(flags if given.flags else {}),
    ),
    train_dataset=tokens(train),
    eval_dataset=tokens(validation),
    data_collator=DataCollatorWithPadding(tokenizer),
    processing_class=tokenizer,
    compute_metrics=accuracy,
    callbacks=[FirstStep()] if given.first_step else None,
)
test_rows = tokens(test)
begin = time.perf_counter()
trainer.train()
figures = trainer.evaluate(test_rows)
print("worked", time.perf_counter() - begin, "s")
print("test accuracy", figures["eval_accuracy"])
trainer.save_model(f"{given.folder}/trainer_model")
