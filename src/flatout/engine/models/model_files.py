"""Save a model's files for other libraries, and the merged model of an adapter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatout.engine.families import family_of
from flatout.engine.models.adapters import MARK, MERGED, has_adapter
from flatout.engine.models.building import load_pretrained
from flatout.engine.parameters import Settings

MODES = {"mean": "mean_tokens", "first": "cls_token", "last": "lasttoken"}
"""The names of flatout's pooling modes in sentence-transformers."""
PREFIX = "sentence_transformers.models."
RANKER = "reranking"
"""The task whose models can be loaded with `CrossEncoder`."""
MODULES = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
"""The folders of sentence-transformers modules, keyed by class, in execution order."""


@dataclass(frozen=True)
class ModelFiles:
    """The additional files of `model`. If the model has an adapter, they include the
    model's config, which peft does not save, and the merged model."""

    model: Any
    parts: Sequence[Any]
    """Objects that are also saved next to the merged model, such as the tokenizer."""
    settings: Settings

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the additional files to `folder`, which already contains the weights."""
        config, lora = self.model.config, self.settings.model.lora
        save_sample_files(config, Path(folder))
        save_sentence_files(config, Path(folder), self.settings.tokenize.max_length)
        if not has_adapter(self.model):
            return
        config.save_pretrained(folder)
        if lora.merged:
            trusts = self.settings.model.trust_remote_code
            whole = load_pretrained(Path(folder), trust_remote_code=trusts)
            setattr(whole.config, MARK, True)
            for part in (whole, *self.parts, replace(self, model=whole)):
                part.save_pretrained(Path(folder, MERGED))


def save_sample_files(config: Any, folder: Path) -> None:
    """Save the files that transformers needs to read samples, such as the config of an
    image processor."""
    for name, content in family_of(config).samples.extra_files(config).items():
        _write(folder / name, content)


def save_sentence_files(config: Any, folder: Path, max_length: int) -> None:
    """Save the JSON files that sentence-transformers needs, if the model is an
    embedding model or a reranker."""
    pooling = getattr(config, "flatout_pooling", None)
    if pooling is not None:
        contents = _of_vectors(pooling, config.hidden_size, max_length)
        Path(folder, MODULES["Normalize"]).mkdir(exist_ok=True)
    elif getattr(config, "flatout_task", None) == RANKER:
        contents = _of_scores(max_length)
    else:
        return
    for name, content in contents.items():
        _write(folder / name, content)


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    path.write_text(text, encoding="utf-8")


def _of_vectors(pooling: str, width: int, max_length: int) -> dict[str, Any]:
    keys = {f"pooling_mode_{theirs}": ours == pooling for ours, theirs in MODES.items()}
    return {
        "modules.json": _modules(MODULES),
        "sentence_bert_config.json": {
            "max_seq_length": max_length,
            "do_lower_case": False,
        },
        "config_sentence_transformers.json": {"similarity_fn_name": "cosine"},
        "1_Pooling/config.json": {"word_embedding_dimension": width, **keys},
    }


def _of_scores(max_length: int) -> dict[str, Any]:
    """Return the names and contents of the files for a reranker. sentence-transformers
    before version 6 ignores these files, and reads only the model and its tokenizer."""
    text = {"method": "forward", "method_output_name": "logits"}
    return {
        "modules.json": _modules({"Transformer": ""}),
        "sentence_bert_config.json": {
            "max_seq_length": max_length,
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
