"""Files that make a model's folder usable by sentence-transformers, which flatout does
not need: its modules, as JSON next to the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODES = {"mean": "mean_tokens", "first": "cls_token", "last": "lasttoken"}
"""Keys of sentence-transformers for flatout's names."""
PREFIX = "sentence_transformers.models."
RANKER = "reranking"
"""The task whose models `CrossEncoder` loads."""
MODULES = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
"""Classes and their folders, in order of execution."""


@dataclass(frozen=True)
class SentenceFiles:
    """Files for a model with pooled and normalised vectors, or of passages' scores;
    saved into its folder like a tokenizer."""

    pooling: str | None
    """None: the model gives scores."""
    width: int
    max_length: int

    @classmethod
    def of(cls, config: Any, max_length: int) -> tuple[SentenceFiles, ...]:
        """One element if the model computes text vectors or scores passages, else an
        empty tuple."""
        pooling = getattr(config, "flatout_pooling", None)
        if pooling is None and getattr(config, "flatout_task", None) != RANKER:
            return ()
        return (cls(pooling, config.hidden_size, max_length),)

    def save_pretrained(self, folder: str | Path) -> None:
        """Save next to the weights of the model."""
        contents = self._of_scores() if self.pooling is None else self._of_vectors()
        for name, content in contents.items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if self.pooling is not None:
            Path(folder, MODULES["Normalize"]).mkdir(exist_ok=True)

    def _of_vectors(self) -> dict[str, Any]:
        pooling: dict[str, Any] = {"word_embedding_dimension": self.width}
        for ours, theirs in MODES.items():
            pooling[f"pooling_mode_{theirs}"] = ours == self.pooling
        return {
            "modules.json": _modules(MODULES),
            "sentence_bert_config.json": {
                "max_seq_length": self.max_length,
                "do_lower_case": False,
            },
            "config_sentence_transformers.json": {"similarity_fn_name": "cosine"},
            "1_Pooling/config.json": pooling,
        }

    def _of_scores(self) -> dict[str, Any]:
        """Versions before 6 read only the model and its tokenizer."""
        text = {"method": "forward", "method_output_name": "logits"}
        return {
            "modules.json": _modules({"Transformer": ""}),
            "sentence_bert_config.json": {
                "max_seq_length": self.max_length,
                "transformer_task": "sequence-classification",
                "modality_config": {"text": text},
                "module_output_name": "scores",
            },
            "config_sentence_transformers.json": {
                "model_type": "CrossEncoder",
                "activation_fn": "torch.nn.modules.activation.Sigmoid",
            },
        }


def _modules(paths: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {"idx": at, "name": str(at), "path": path, "type": PREFIX + name}
        for at, (name, path) in enumerate(paths.items())
    ]
