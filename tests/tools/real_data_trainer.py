# ruff: noqa: T201
"""The public data sets of `real_data` by transformers' Trainer, as a reference.

    python -m tests.tools.real_data_trainer --data FOLDER --model FOLDER --only mrpc

Same files, model, epochs, batch, rate, warm-up, decay and choice of the best epoch as
`real_data`; tokenizing, padding, losses and figures are transformers', scikit-learn's
and scipy's. gsm8k takes the token rows that `real_data --keep KEPT` has left
(`--kept KEPT`), since a perplexity is that of its tokens.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, load_from_disk
from scipy.stats import spearmanr
from sklearn.metrics import f1_score
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

from tests.tools.real_data_sets import COMMON, SETS, SPLITS

Rows = list[dict[str, Any]]
Figure = Callable[[Any], dict[str, float]]


def rows_of(folder: Path, split: str, most: int | None) -> Rows:
    with gzip.open(folder / f"{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for _, line in zip(range(most or 10**9), lines)]  # noqa: B905


class Reference:
    """What a data set needs for the Trainer."""

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        self.name, self.given = name, given
        self.parameters = SETS[name].parameters
        self.length = self.parameters["tokenize"]["max_length"]
        self.tokenizer: Any = None

    def splits(self) -> list[Dataset]:
        """Train, validation and test, encoded."""
        if self.name == "gsm8k":
            return self._kept()
        self.tokenizer = AutoTokenizer.from_pretrained(self.given.model)
        folder = self.given.data / self.name
        found = [rows_of(folder, split, self.given.rows) for split in SPLITS]
        self.names = self._names(found[0])
        return [Dataset.from_list([self._encode(row) for row in own]) for own in found]

    def _kept(self) -> list[Dataset]:
        folder = self.given.kept / self.name / "data"
        tokenizer = AutoTokenizer.from_pretrained(folder / "06_models/tokenizer")
        self.tokenizer, self.names = tokenizer, []
        rows = [load_from_disk(folder / f"05_model_input/{s}_tokens") for s in SPLITS]
        return [own.select_columns(["input_ids", "labels"]) for own in rows]

    def _names(self, rows: Rows) -> list[str]:
        column = self.parameters["split"].get("label_column", "label")
        if self.name == "stsb":
            return ["score"]
        values = (row[column] for row in rows)
        lists = (own if isinstance(own, list) else [own] for own in values)
        return sorted({name for own in lists for name in own})

    def _encode(self, row: dict[str, Any]) -> dict[str, Any]:
        cut = {"truncation": True, "max_length": self.length}
        if self.name == "conll2003":
            return self._tagged(row, cut)
        encoded = dict(self.tokenizer(row["text"], row.get("second"), **cut))
        if self.name == "goemotions":
            encoded["labels"] = [float(n in row["labels"]) for n in self.names]
        elif self.name == "stsb":
            encoded["labels"] = row["score"]
        else:
            encoded["labels"] = self.names.index(row["label"])
        return encoded

    def _tagged(self, row: dict[str, Any], cut: dict[str, Any]) -> dict[str, Any]:
        """A word's tag is that of its first piece."""
        encoded = self.tokenizer(row["tokens"], is_split_into_words=True, **cut)
        labels, before = [], None
        for word in encoded.word_ids():
            fresh = word is not None and word != before
            labels.append(self.names.index(row["tags"][word]) if fresh else -100)
            before = word
        return {**encoded, "labels": labels}

    def model(self) -> Any:
        if self.name == "gsm8k":
            sizes = self.parameters["model"]["config"]
            special = {
                name: getattr(self.tokenizer, name)
                for name in ("pad_token_id", "bos_token_id", "eos_token_id")
            }
            words = {"vocab_size": len(self.tokenizer), **special}
            return AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**sizes | words)
            )
        kind: Any = AutoModelForSequenceClassification
        if self.name == "conll2003":
            kind = AutoModelForTokenClassification
        problem = {
            "goemotions": "multi_label_classification",
            "stsb": "regression",
        }.get(self.name)
        return kind.from_pretrained(
            self.given.model,
            num_labels=len(self.names),
            problem_type=problem,
            dtype=torch.float32,
        )

    def collator(self) -> Any:
        if self.name == "conll2003":
            return DataCollatorForTokenClassification(self.tokenizer)
        if self.name == "gsm8k":
            return DataCollatorForSeq2Seq(self.tokenizer)
        return DataCollatorWithPadding(self.tokenizer)

    def figure(self, found: Any) -> dict[str, float]:
        """By the name of the set's metric."""
        scores, truth = found.predictions, found.label_ids
        metric = SETS[self.name].metric
        if metric == "accuracy":
            return {metric: float((scores.argmax(-1) == truth).mean())}
        if metric == "spearman":
            return {metric: float(spearmanr(scores[:, 0], truth).statistic)}
        if metric == "f1_macro":
            limit = self.parameters["model"]["label_threshold"]
            guess = 1 / (1 + np.exp(-scores)) > limit
            return {metric: f1_score(truth, guess, average="macro", zero_division=0)}
        return {metric: self._of_chunks(scores.argmax(-1), truth)}

    def _of_chunks(self, guess: Any, truth: Any) -> float:
        """CoNLL's F1: a chunk is right where its begin, end and kind are."""
        right = found = there = 0
        for own, told in zip(guess, truth, strict=True):
            kept = told != -100
            ours, theirs = (
                chunks([self.names[n] for n in x[kept]]) for x in (own, told)
            )
            right += len(ours & theirs)
            found, there = found + len(ours), there + len(theirs)
        return 2 * right / max(1, found + there)


def chunks(tags: list[str]) -> set[tuple[int, int, str]]:
    """(begin, end, kind) of IOB2; I- behind another kind begins a chunk."""
    found, begin = set(), None
    for at, tag in enumerate([*tags, "O"]):
        goes_on = begin is not None and tag == f"I-{begin[1]}"
        if begin is not None and not goes_on:
            found.add((begin[0], at, begin[1]))
            begin = None
        if begin is None and tag != "O":
            begin = (at, tag[2:])
    return found


def run(name: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """Train, choose the best epoch, and judge the test split."""
    set_seed(seed)
    reference = Reference(name, given)
    train, validation, test = reference.splits()
    own = {**COMMON, **SETS[name].parameters["train"]}
    metric = SETS[name].metric
    causal = metric == "perplexity"
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder,
            seed=seed,
            num_train_epochs=given.epochs or own["epochs"],
            per_device_train_batch_size=own["global_batch_size"],
            per_device_eval_batch_size=64,
            learning_rate=own["learning_rate"],
            warmup_steps=own["warmup_fraction"],  # below 1: a share of the steps
            weight_decay=0.01,
            bf16=torch.cuda.is_available(),
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=1,
            load_best_model_at_end=True,
            metric_for_best_model="loss" if causal else metric,
            greater_is_better=not causal,
            prediction_loss_only=causal,
            report_to="none",
            disable_tqdm=True,
            dataloader_num_workers=0,
        )
        trainer = Trainer(
            reference.model(),
            options,
            data_collator=reference.collator(),
            train_dataset=train,
            eval_dataset=validation,
            compute_metrics=None if causal else reference.figure,
        )
        began = time.perf_counter()
        trained = trainer.train().metrics
        seconds = time.perf_counter() - began
        found = trainer.evaluate(test, metric_key_prefix="test")
    figure = math.exp(found["test_loss"]) if causal else found[f"test_{metric}"]
    rate = trained["train_samples_per_second"]
    return {"seconds": seconds, "figure": float(figure), "samples_per_s": rate}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="converted files")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--kept", type=Path, help="what real_data --keep has left")
    parser.add_argument("--only", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--rows", type=int, help="of each split, the first ones")
    parser.add_argument("--epochs", type=float)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    given = parser.parse_args()
    print("| data set | seed | metric | test figure | samples/s, evaluation included |")
    print("|---|---|---|---|---|")
    for name in given.only:
        for seed in given.seeds:
            found = run(name, seed, given)
            print(
                f"| {name} | {seed} | {SETS[name].metric} | {found['figure']:.4g} "
                f"| {found['samples_per_s']:,.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
