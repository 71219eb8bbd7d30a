"""Files that make a model's folder usable by sentence-transformers, which flatout does
not need: its modules, as JSON next to the weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODES = {"mean": "mean_tokens", "first": "cls_token", "last": "lasttoken"}
"""Keys of sentence-transformers for flatout's names."""
PREFIX = "sentence_transformers.models."
MODULES = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
"""Classes and their folders, in order of execution."""


@dataclass(frozen=True)
class SentenceFiles:
    """Files for a model with pooled and normalised vectors; saved into its folder like
    a tokenizer."""

    pooling: str
    width: int
    max_length: int

    @classmethod
    def of(cls, config: Any, max_length: int) -> tuple[SentenceFiles, ...]:
        """One element if the model computes text vectors, else an empty tuple."""
        pooling = getattr(config, "flatout_pooling", None)
        return (
            () if pooling is None else (cls(pooling, config.hidden_size, max_length),)
        )

    def save_pretrained(self, folder: str | Path) -> None:
        """Save next to the weights of the model."""
        modules = [
            {"idx": at, "name": str(at), "path": path, "type": PREFIX + name}
            for at, (name, path) in enumerate(MODULES.items())
        ]
        pooling: dict[str, Any] = {"word_embedding_dimension": self.width}
        for ours, theirs in MODES.items():
            pooling[f"pooling_mode_{theirs}"] = ours == self.pooling
        contents = {
            "modules.json": modules,
            "sentence_bert_config.json": {
                "max_seq_length": self.max_length,
                "do_lower_case": False,
            },
            "config_sentence_transformers.json": {"similarity_fn_name": "cosine"},
            "1_Pooling/config.json": pooling,
        }
        for name, content in contents.items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        Path(folder, MODULES["Normalize"]).mkdir(exist_ok=True)
