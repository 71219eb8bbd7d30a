"""Which raw rows the token rows come from, so that old ones never pass for new.

Beside the rows stand the digest of the raw data and, noted by `OriginHooks`, a hash of
what the catalog said of `raw_texts` then: its entry, and the sizes and times of its
files, or what their store says of them. Where these are as they were nothing is read;
where they are not, the digest decides.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import DataCatalog, DatasetError
from kedro.pipeline import Pipeline

from flatout.datasets import DocstringCorpus, KeyedArrowDataset
from flatout.engine.data.columns import Columns
from flatout.engine.data.raw_texts import SPLITS, open_raw_texts
from flatout.engine.data.split_recipes import ROWS_DIGEST, split_options
from flatout.engine.files.atomic_folder import note_facts, stored_facts, stored_key
from flatout.engine.files.content_key import ContentKey
from flatout.engine.parameters import Settings
from flatout.engine.parameters.faults import first_line
from flatout.engine.tasks import columns_of
from flatout.project.parameters.hooks import TRAINING_NODES, checked_settings
from flatout.project.raw_origin import origin_of

logger = logging.getLogger(__name__)

ORIGIN = "raw_texts"
"""The fact of a folder that says what its rows were made from."""
DECIDES_NO_ROW = ("max_rejected_fraction", "label_type")
"""Of the options of split: a limit, and what the tokens' own check tells."""


class OriginHooks:
    """Notes where rows come from, and refuses to train on rows of something else."""

    _catalog: DataCatalog | None = None
    _origin: dict[str, Any] | None = None

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        self._settings = checked_settings(context)

    @hook_impl
    def before_pipeline_run(self, pipeline: Pipeline, catalog: DataCatalog) -> None:
        self._catalog, self._origin = catalog, None
        if not TRAINING_NODES & {node.name for node in pipeline.nodes}:
            return
        fault, kind = None, self._settings.train.rows
        if f"train_{kind}" in pipeline.inputs() and kind != "tokens":
            fault = samples_fault(catalog, self._settings)
        elif "train_tokens" in pipeline.inputs():
            fault = tokens_fault(catalog, self._settings)
        elif "train_rows" in pipeline.inputs():
            fault = rows_fault(catalog, self._settings)
        if fault:
            from flatout.engine.tokenizing.token_keys import StaleTokensError

            raise StaleTokensError(fault)

    @hook_impl
    def after_dataset_loaded(self, dataset_name: str) -> None:
        if dataset_name == "raw_texts" and self._catalog is not None:
            self._origin = origin_of(self._catalog, fetched=True)

    @hook_impl
    def after_dataset_saved(self, dataset_name: str) -> None:
        """Also where the rows were kept: their source may have another name now."""
        if self._catalog is None or dataset_name not in ("train_rows", "train_tokens"):
            return
        folder = _folder(self._catalog, dataset_name)
        if dataset_name == "train_tokens" and (rows := self._rows_folder()):
            self._origin = stored_facts(rows).get(ORIGIN)
        if folder is not None and self._origin is not None:
            note_facts(folder, {ORIGIN: self._origin})

    def _rows_folder(self) -> Path | None:
        return None if self._catalog is None else _folder(self._catalog, "train_rows")


def samples_fault(catalog: DataCatalog, settings: Settings) -> str | None:
    """What samples of a fixed shape were made from, where that is another now; None
    where it cannot be known because the raw files are not here."""
    from flatout.engine.arrays.opening import open_source
    from flatout.engine.arrays.recipes import changes_since

    kind, splits = settings.train.rows, []
    for split in SPLITS:
        folder = _folder(catalog, f"{split}_{kind}")
        if folder is not None and (key := stored_key(folder)):
            splits.append(key)
    try:
        source = open_source(kind, catalog.load(f"raw_{kind}"), settings)
        changes = {
            change
            for key in splits
            for change in changes_since(key, source, settings.split, settings.model)
        }
    except (DatasetError, OSError, ValueError) as error:
        logger.info("raw_%s: not compared with the rows: %s", kind, error)
        return None
    if not changes:
        return None
    return (
        f"the {kind} were made from something else (then -> now): "
        f"{'; '.join(sorted(changes))}. Run kedro run, or set the parameters back"
    )


def tokens_fault(catalog: DataCatalog, settings: Settings) -> str | None:
    """What the tokens were made from, and what is there in its place; None where that
    is the same, or cannot be known because rows or raw data are not here."""
    stale = [name for name in SPLITS if _is_stale(catalog, name)]
    tokens, rows = _folder(catalog, "train_tokens"), _folder(catalog, "train_rows")
    if not stale or tokens is None or rows is None:
        return rows_fault(catalog, settings)
    then, now = _name(stored_facts(tokens)), _name(stored_facts(rows))
    names = " and ".join(f"{name}_tokens" for name in stale)
    return (
        f"{names} were made from {then or 'other rows'}, and split has since read "
        f"{now or 'others'}: run kedro run, or kedro run --pipelines=tokenize"
    )


def _is_stale(catalog: DataCatalog, split: str) -> bool:
    rows, tokens = (_folder(catalog, f"{split}_{n}") for n in ("rows", "tokens"))
    if rows is None or tokens is None:
        return False
    digest, key = stored_facts(rows).get(ROWS_DIGEST), stored_key(tokens)
    return None not in (digest, key) and key.fields.get("rows") != digest  # type: ignore[union-attr]


def rows_fault(catalog: DataCatalog, settings: Settings) -> str | None:
    """The same of the rows that split made, and of its parameters."""
    folder = _folder(catalog, "train_rows")
    key = stored_key(folder) if folder else None
    if folder is None or key is None or "raw_texts" not in key.fields:
        logger.info("what the tokens were made from is not here: taken as they are")
        return None
    task = settings.model.task
    columns = columns_of(settings.split, task)
    changes = _changed_options(key, columns, settings)
    if changes:
        return (
            f"the rows were split with other parameters (then -> now): "
            f"{'; '.join(changes)}. Run kedro run, or set the parameters back"
        )
    now = origin_of(catalog)
    if now is None:
        logger.info("raw_texts cannot be opened here: the tokens are taken as they are")
    if now is None or _is_untouched(folder, now):
        return None
    same = _same_content(catalog, key, columns)
    if same:
        note_facts(folder, {ORIGIN: now})
    if same is not False:
        return None
    then, here = _name(stored_facts(folder)), _name({ORIGIN: now})
    if then == here:
        return (
            f"{here or 'raw_texts'} holds other rows than those that the tokens were "
            "made from: run kedro run"
        )
    return (
        f"the tokens were made from {then or 'other data'}, raw_texts is now {here} "
        "(a file's name counts, too): run kedro run, or set raw_texts back"
    )


def _is_untouched(folder: Path, now: Mapping[str, Any]) -> bool:
    """By what the catalog says of raw_texts."""
    same = stored_facts(folder).get(ORIGIN) == now
    if same and not now["tells_changes"]:
        text = "%s has no files to look at: not compared with the tokens"
        logger.info(text, now["name"])
    return bool(same)


def _changed_options(
    key: ContentKey, columns: Columns, settings: Settings
) -> list[str]:
    wanted = {
        f"split.{name}": value
        for name, value in split_options(columns, settings.split).items()
        if name not in DECIDES_NO_ROW
    }
    if not columns.has_labels:  # of the task, which the tokens' own check compares
        del wanted["split.label_column"]
    stored = {name: key.fields.get(name.removeprefix("split.")) for name in wanted}
    return ContentKey(wanted).changes_since(ContentKey(stored))


def _same_content(
    catalog: DataCatalog, key: ContentKey, columns: Columns
) -> bool | None:
    """By the digest of all raw rows; None where they cannot be had."""
    entry = catalog.get("raw_texts")
    if isinstance(entry, DocstringCorpus) and not entry.is_parsed:
        return None
    logger.info("raw_texts is not as it was: comparing what it holds")
    try:
        raw = open_raw_texts(entry.load())
        if set(columns.names) - set(raw.column_names):
            return False
        return bool(raw.digest(columns.names) == key.fields["raw_texts"])
    except Exception as error:  # each kind of entry has errors of its own
        why = first_line(error)
        logger.warning("raw_texts cannot be compared with the tokens: %s", why)
        return None


def _name(facts: Mapping[str, Any]) -> str | None:
    origin = facts.get(ORIGIN)
    return origin.get("name") if isinstance(origin, Mapping) else None


def _folder(catalog: DataCatalog, name: str) -> Path | None:
    """Of an entry that keeps a key; None for a user's own kind of entry."""
    entry = catalog.get(name)
    if not isinstance(entry, KeyedArrowDataset):
        return None
    return Path(entry._describe()["filepath"])
