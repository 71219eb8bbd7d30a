"""Compare the test metrics of models fine-tuned by flatout and by the Trainer.

    python -m benchmarks.quality --data FOLDER --model FOLDER --parallel 6

Both train on the same tokens with the same settings and several seeds. The data folder
contains CSV files such as STS-B-train.csv, which have no header. Each record has two
texts and a label.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import mean, stdev, variance
from typing import Any

import pandas as pd
import transformers
from scipy.stats import spearmanr

from benchmarks import training
from benchmarks.harness import Figures, Script, main, parser_of

CLASSES: dict[str, list[str]] = {"STS-B": [], "MRPC": ["different", "paraphrase"]}
SHARED = {"learning_rate": 5e-5, "weight_decay": 0.01}
FLAGS = {"bf16": training.IS_CUDA, "save_strategy": "no", "report_to": "none"}
BATCH, EPOCHS, WARM, LONGEST = 32, 3, 0.1, 128


def tokens(given: argparse.Namespace, tokenizer: Any, split: str) -> Any:
    """Return the token rows of a split. The labels are scores (STS-B) or classes."""
    file, most = given.data / f"{given.case}-{split}.csv", 64 if given.small else None
    rows = pd.read_csv(file, header=None, nrows=most)
    first, second, labels = (rows[n].tolist() for n in range(3))
    return training.text_table(tokenizer, (first, second), labels, LONGEST)


def flatout(given: argparse.Namespace, *parts: Any) -> Any:
    train = {**SHARED, "global_batch_size": BATCH, "warmup_fraction": WARM}
    more = CLASSES[given.case], int(given.turn), LONGEST
    return training.fine_tuned(*parts, *more, epochs=EPOCHS, **train)


def trainer(given: argparse.Namespace, table: Any, tokenizer: Any, folder: Path) -> Any:
    transformers.set_seed(int(given.turn))
    arguments = transformers.TrainingArguments(
        str(folder),
        seed=int(given.turn),
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        warmup_steps=WARM,  # below 1: a fraction of all steps
        **SHARED,
        **FLAGS,
    )
    size = {"num_labels": len(CLASSES[given.case]) or 1, "dtype": "float32"}
    auto = transformers.AutoModelForSequenceClassification
    model = auto.from_pretrained(given.model, **size)
    collator = transformers.DataCollatorWithPadding(tokenizer)
    transformers.Trainer(model, arguments, collator, table.to_pylist()).train()
    return model


def side(trained: Any, given: argparse.Namespace) -> Figures:
    """Train, and return the Spearman correlation or the accuracy on the test rows."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    train, test = (tokens(given, tokenizer, split) for split in ("train", "test"))
    with tempfile.TemporaryDirectory(prefix="quality-") as name:
        model = trained(given, train, tokenizer, Path(name))
        logits = training.logits_of(model, tokenizer, test)
    labels = test["labels"].to_numpy()
    right = logits.argmax(1) == labels
    scored = given.case == "STS-B"
    found = spearmanr(logits[:, 0], labels).statistic if scored else right.mean()
    return {"test_metric": float(found)}


SIDES = {"flatout": partial(side, flatout), "Trainer": partial(side, trainer)}
ABOUT = "test metrics compared with the Trainer"
CASES = dict.fromkeys(CLASSES, SIDES)
SCRIPT = Script("benchmarks.quality", ABOUT, CASES, figure="test_metric")


def summary(case: str, runs: dict[str, list[Figures]]) -> str:
    """Return a table row with the mean and standard deviation of each side, and the
    difference of the means with its standard error."""
    values = [[run["test_metric"] for run in own] for own in runs.values()]
    cells = [f"{mean(own):.4f}, {stdev(own):.4f}" for own in values]
    error = sum(variance(own) / len(own) for own in values) ** 0.5
    cells.append(f"{mean(values[0]) - mean(values[1]):.4f}, {error:.4f}")
    return f"\n| {case} | {' | '.join(cells)} |\n"


def run() -> int:
    parser = parser_of(SCRIPT)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True, help="checkpoint")
    parser.set_defaults(turns=9)
    given = parser.parse_args()
    code = main(SCRIPT, parser)
    if not (code or given.side or given.without) and given.turns > 1:
        runs = json.loads((given.out / "quality.json").read_text())["runs"]
        sys.stdout.writelines(summary(case, own) for case, own in runs.items())
    return code


if __name__ == "__main__":
    raise SystemExit(run())
