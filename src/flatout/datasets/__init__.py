"""Kedro datasets of flatout. Each class is imported on first use, so that the `split`
pipeline imports neither transformers nor torch."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "CsvTable": "benchmark_files",
    "Digits": "digits",
    "DocstringCorpus": "docstring_corpus",
    "HubTexts": "raw_texts",
    "KeptTable": "benchmark_files",
    "KeyedArrowDataset": "keyed",
    "KeyedJSONDataset": "keyed_files",
    "KeyedParquetDataset": "keyed_files",
    "LogSessions": "log_sessions",
    "OwnSplits": "raw_texts",
    "ParquetStream": "keyed_files",
    "RawFiles": "raw_texts",
    "SyntheticSessions": "log_sessions",
    "TextFiles": "raw_texts",
    "TokenizerFile": "keyed",
    "TokenizerFolder": "keyed",
    "TransformersModel": "transformers_model",
    "TunedParameters": "benchmark_files",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
