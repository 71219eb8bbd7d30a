"""Settings, rows and training jobs that many test modules use."""

import io
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from flatout.engine.arrays.recipes import array_recipes
from flatout.engine.data.raw_texts import open_raw_texts
from flatout.engine.data.split_recipes import plan_split
from flatout.engine.files.arrow_folder import ArrowRecipe
from flatout.engine.files.content_key import ContentKey, arrow_digest
from flatout.engine.models.building import Vocabulary, build, load_pretrained
from flatout.engine.parameters import (
    ModelSettings,
    Settings,
    SplitSettings,
    TokenizeSettings,
    parse_settings,
)
from flatout.engine.rows.rows import SplitRows, rows_from_dataset
from flatout.engine.tasks import columns_of, make_task
from flatout.engine.tokenizing.tokenizer import TokenizerFile, TokenizerRecipe
from flatout.engine.train.setup.job import TrainJob
from tests.engine.families import LABEL_NAMES, MAX_LENGTH, NAMED, token_rows
from tests.engine.runs import make_job

SPLITS = {"train": 60, "validation": 20, "test": 21}
"""Number of token rows in each split."""


def exact_settings(**groups: Any) -> Settings:
    """Return settings for one thread in fp32."""
    runtime = {"precision": "fp32", "tf32": False, "threads": 1}
    return parse_settings({"runtime": runtime, **groups})


def samples_settings(kind: str, model: Mapping[str, Any], **groups: Any) -> Settings:
    """Return settings for training on `kind` (arrays or images) with batch size 16."""
    train = {
        "rows": kind,
        "global_batch_size": 16,
        "epochs": 3,
        "log_every": 1,
        "distributed": {"num_processes": 1},
    }
    return parse_settings(
        {
            "runtime": {"precision": "fp32", "threads": 1, "seed": 3},
            "split": {"max_rejected_fraction": 1},
            **groups,
            "model": dict(model),
            "train": train | groups.get("train", {}),
        }
    )


def samples_job(folder: Path, settings: Settings, made: Mapping[str, Any]) -> TrainJob:
    """Return a training job on the splits in `made`, which are recipes of samples."""
    rows: Sequence[SplitRows] = [
        rows_from_dataset(made[name].to_dataset()) for name in SPLITS
    ]
    regression = settings.model.task == "regression"
    names = () if regression else tuple(made["label_names"])
    places = folder / "run", folder / "metrics.jsonl"
    return TrainJob(settings, *rows, None, names, *places, "k")


def task_rows(task: str, rows: int = SPLITS["train"]) -> dict[str, SplitRows]:
    """Return token rows of each split, with labels for `task`."""
    return {name: token_rows(task, n) for name, n in (SPLITS | {"train": rows}).items()}


def task_job(
    folder: Path, task: str, config: Mapping[str, Any], **train: Any
) -> TrainJob:
    """Return the job of `make_job` with another task and model."""
    job = make_job(folder, **train)
    given = job.settings.model_dump(mode="json")
    given["model"] |= {"task": task, "config": dict(config)}
    names = tuple(LABEL_NAMES) if task in NAMED else ()
    chosen = parse_settings(given)
    return replace(job, settings=chosen, label_names=names, **task_rows(task))


def save_random(
    folder: Path,
    tokenizer: Path,
    settings: ModelSettings,
    label_names: Sequence[str] = (),
    factor: float = 15,
) -> Path:
    """Save a model and a copy of its tokenizer. The random weights are so large that
    predictions differ from row to row."""
    known = AutoTokenizer.from_pretrained(tokenizer)
    task, vocabulary = make_task(settings, list(label_names)), Vocabulary.of(known)
    torch.manual_seed(0)
    model = build(settings, task, vocabulary, MAX_LENGTH, "sdpa")
    for weight in model.parameters():
        weight.data *= factor if weight.dim() > 1 else 1
    model.save_pretrained(folder)
    known.save_pretrained(folder)
    return folder


def plain_logits(folder: Path, rows: SplitRows) -> list[torch.Tensor]:
    """Return the logits of transformers alone, row by row."""
    model = load_pretrained(folder).eval()
    ids = [torch.tensor([view.tolist()]) for view in rows.views(np.arange(len(rows)))]
    with torch.no_grad():
        return [model(input_ids=one).logits[0] for one in ids]


KINDS = ("texts", "arrays", "images")
"""The kinds of rows that can be split."""
FAULTS = {
    "texts": "text is missing",
    "arrays": "NaN",
    "images": "not an image of a known kind",
}
"""The reasons why the bad rows of `raw_rows` are rejected."""
Numbered = Sequence[tuple[int, str]]
"""Numbers and labels of rows. Each row contains its number."""


def raw_rows(kind: str, folder: Path, rows: Numbered, bad: Container[int] = ()) -> Any:
    """Return raw data, written below `folder`. Rows with numbers in `bad` are
    invalid."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers, labels = zip(*rows, strict=True)
    if kind == "texts":
        texts = [None if n in bad else f"text number {n} of many" for n in numbers]
        return pd.DataFrame({"text": texts, "label": labels})
    if kind == "arrays":
        values = [[np.nan if n in bad else n, n % 7] for n in numbers]
        path = folder / "a.npz"
        np.savez(path, inputs=np.array(values, np.float32), label=labels)
        return path
    for n in {*numbers}:
        (folder / f"{n}.png").write_bytes(b"" if n in bad else _picture(n))
    lines = [f"{n}.png,{label}" for n, label in rows]
    (folder / "all.csv").write_text("\n".join(["image,label", *lines]))
    return folder / "all.csv"


@cache
def _picture(number: int) -> bytes:
    random, file = np.random.default_rng(number), io.BytesIO()
    pixels = random.integers(0, 255, (8, 8, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def text_recipes(
    raw: Any, task: str = "sequence-classification", **split: Any
) -> dict[str, Any]:
    """Return the recipes of a split of texts for `task`."""
    settings = SplitSettings(**split)
    return plan_split(open_raw_texts(raw), columns_of(settings, task), settings)


def saved_tokenizer(
    folder: Path, rows: Any, model: ModelSettings, limits: TokenizeSettings
) -> TokenizerFile:
    """Return a tokenizer that is trained on `rows`, and saved in `folder`."""
    TokenizerRecipe(rows, model, limits).build().save_pretrained(folder)
    return TokenizerFile(folder)


def byte_pairs(
    texts: list[str], size: int, splitting: Any, special: Sequence[str] = ("<|end|>",)
) -> Tokenizer:
    """Return a tokenizer of byte pairs that is trained on `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitting
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def split_recipes(kind: str, raw: Any, **split: Any) -> dict[str, Any]:
    """Return `train`, `validation`, `test`, `rejected` and `report` for any kind."""
    if kind == "texts":
        found = text_recipes(raw, **split)
        return {name.replace("_rows", ""): made for name, made in found.items()} | {
            "report": found["split_report"]
        }
    model = {
        "arrays": {"task": "sequence-classification", "type": "residual_mlp"},
        "images": {"task": "image-classification", "type": "vit"},
    }[kind]
    config = {"model_type": model.pop("type"), "patch_size": 4}
    groups = {"images": {"size": 8}, "split": split}
    chosen = samples_settings(kind, {**model, "config": config}, **groups)
    return array_recipes(raw, chosen.split, getattr(chosen, kind), chosen.model)


def numbers_in(kind: str, recipe: Any) -> list[int]:
    """Return the numbers that `raw_rows` gave to the rows of a split."""
    rows = recipe.to_dataset()
    if kind == "images":
        return [int(Path(source).stem) for source in rows["source"]]
    if kind == "arrays":
        return [int(values[0]) for values in rows["inputs"]]
    return [int(text.split()[2]) for text in rows["text"]]


@dataclass(frozen=True)
class TableRecipe(ArrowRecipe):
    """Recipe of an existing table. Its key is a hash of the rows."""

    table: Any

    @property
    def key(self) -> ContentKey:  # type: ignore[override]
        return ContentKey({"rows": arrow_digest([self.table])})

    @property
    def schema(self) -> Any:
        return self.table.schema.remove_metadata()

    def batches(self) -> Iterator[Any]:
        yield from self.table.replace_schema_metadata().to_batches()
