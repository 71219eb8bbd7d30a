"""Find wrong labels by statistics of each training row over all epochs (`train.audit`).

The statistics of each row are sums on the device. Steps update them without
synchronising the device. The margin of a row is the logit of its label minus the
highest other logit. Its mean over the epochs is low for wrong labels (Pleiss et al.
2020, "Identifying Mislabeled Data using the Area Under the Margin Ranking").
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from flatout.engine.data.row_facts import TEXT_HASH
from flatout.engine.files.atomic_write import write_file, write_text
from flatout.engine.models.trained_rows import row_hashes
from flatout.engine.parameters import SettingsError
from flatout.engine.tasks import names_classes
from flatout.engine.train.setup.job import TrainJob, cut, decoder, printable

logger = logging.getLogger(__name__)

FILE_NAME = "suspect_rows.parquet"
MISLABELLED, AMBIGUOUS = "probably mislabelled", "ambiguous"
NEVER_LEARNT, TWICE = "never learnt", "duplicate with another label"
SHOWN, CHARACTERS = 50, 200
"""The maximum number of rows on the Markdown page, and of characters per text."""
MOST_SUSPECT = 0.2
"""If more than this fraction of rows is suspect, the model is probably at fault."""


def check_audit(job: TrainJob) -> None:
    """Raise SettingsError if `train.audit` is set for a task whose rows do not have one
    class each."""
    task = job.settings.model.task
    if job.settings.train.audit and not names_classes(task):
        raise SettingsError(
            f"train.audit: rows of {task} do not have one class each, which could be "
            "wrong; set it to false. kedro flatout rows --step N --replay shows the "
            "loss of each row"
        )


class RowAudit:
    """Statistics of `num_rows` rows, summed over this rank's steps in this session."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        # The last element collects the padding of micro-batches.
        sums = torch.zeros(4, num_rows + 1, device=device)
        self.seen, self.right, self.margin, self.steady = sums
        self.sums = sums
        # -1 marks rows that have not been seen yet. It differs from every class number.
        self.likely = torch.full((num_rows + 1,), -1, device=device)

    def reset(self) -> None:
        """Set all statistics to zero. This must be done before the first step, because
        passes that measure memory update the statistics too."""
        self.sums.zero_()
        self.likely.fill_(-1)

    def add(self, rows: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Update the statistics of the rows `rows` (K,), given logits (K, classes) and
        labels (K,). The row number of padding is `num_rows`."""
        rows, labels = rows[: len(logits)], labels[: len(logits)].clamp(min=0)
        found = logits.float()
        own = found.gather(1, labels[:, None])
        others = found.scatter(1, labels[:, None], -torch.inf)
        highest, likely = found.max(1).values, found.argmax(1)
        margin = own[:, 0] - others.max(1).values
        ones = torch.ones_like(highest)
        self.steady.index_add_(0, rows, (self.likely[rows] == likely).float())
        self.seen.index_add_(0, rows, ones)
        self.right.index_add_(0, rows, (likely == labels).float())
        self.margin.index_add_(0, rows, margin)
        self.likely.index_copy_(0, rows, likely)

    def gathered(self, world_size: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the sums (4, rows) over all ranks, and each row's last predicted class
        (rows,) from the rank that saw it most often. All ranks must call this."""
        sums, likely = self.sums[:, :-1].clone(), self.likely[:-1].clone()
        if world_size > 1:
            most = sums[0].clone()
            torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
            likely[sums[0] < most] = -1
            torch.distributed.all_reduce(likely, op=torch.distributed.ReduceOp.MAX)
            torch.distributed.all_reduce(sums)
        return sums.cpu().numpy(), likely.cpu().numpy()


def write_audit(job: TrainJob, audit: RowAudit, world_size: int, *, main: bool) -> None:
    """Write a table of suspect rows, and a page with the most suspect ones, next to the
    metrics file. All ranks must call this."""
    sums, likely = audit.gathered(world_size)
    if not main:
        return
    table = suspect_rows(job, sums, likely)
    path = job.metrics_file.with_name(FILE_NAME)
    write_file(path, lambda hidden: pq.write_table(table, hidden))
    found = f"{table.num_rows} of {len(job.train)} train rows are suspect"
    write_text(path.with_suffix(".md"), _page(table.slice(0, SHOWN), found))
    level = logging.INFO
    remedy = "Correct their labels, or set split.drop_rows to a copy of the file"
    if table.num_rows > MOST_SUSPECT * len(job.train):
        level = logging.WARNING
        remedy = "Too many: the model fits too few rows for an audit; train longer"
    logger.log(level, "%s: %s. %s", found, path, remedy)


def _page(table: Any, found: str) -> str:
    """Return a Markdown page with the rows of `table`."""
    names = [name for name in table.column_names if name != TEXT_HASH]
    rows = [[row[name] for name in names] for row in table.to_pylist()]
    lines = [names, ["---"] * len(names), *rows]
    cells = ([_cell(value) for value in line] for line in lines)
    body = "".join(f"| {' | '.join(line)} |\n" for line in cells)
    return f"# Suspect rows\n\n{found}; the worst {len(rows)}:\n\n{body}"


def _cell(value: Any) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return cut(printable(text).replace("|", "\\|"), CHARACTERS)


def suspect_rows(job: TrainJob, sums: Any, likely: Any) -> Any:
    """Return a table of the suspect rows. `sums` (4, rows) and `likely` (rows,) are the
    results of `RowAudit.gathered`."""
    seen, right, margin, steady = sums
    labels = job.train.labels_of(np.arange(len(job.train)))
    passes = np.maximum(seen, 1)
    score, share = -margin / passes, right / passes
    kinds = np.full(len(labels), "", dtype=object)
    wrong = (seen > 0) & (likely != labels)
    kinds[(seen > 0) & (share > 0) & (share < 1) & wrong] = AMBIGUOUS
    kinds[(seen > 0) & (share == 0)] = NEVER_LEARNT
    # The model prefers another class, mostly the same one in every epoch.
    kinds[wrong & (score > 0) & (share <= 0.5) & (steady >= passes / 2)] = MISLABELLED
    kinds[_twice(job, labels)] = TWICE
    rows = np.flatnonzero(kinds != "")
    rows = rows[np.argsort(-score[rows], kind="stable")]
    decode, names = decoder(job), (*job.label_names, None)  # -1 gives None
    columns = {
        "row": rows,
        "kind": pa.array(kinds[rows], pa.string()),
        "text": pa.array([job.train.readable(r, decode) for r in rows.tolist()]),
        "label": pa.array([names[n] for n in labels[rows]], pa.string()),
        "likely_label": pa.array([names[n] for n in likely[rows]], pa.string()),
        "score": score[rows],
        "passes": seen[rows].astype(np.int64),
    }
    if TEXT_HASH in job.train.column_names:
        columns[TEXT_HASH] = job.train.table.column(TEXT_HASH).take(pa.array(rows))
    return pa.table(columns)


def _twice(job: TrainJob, labels: Any) -> npt.NDArray[np.bool_]:
    """Return a boolean array (rows,) that is true for rows whose input also occurs with
    another label."""
    hashes = np.unique(row_hashes(job.train), return_inverse=True)[1]
    classes = labels.max() + 1
    pairs = np.unique(hashes * classes + labels) // classes
    found: npt.NDArray[np.bool_] = (np.bincount(pairs) > 1)[hashes]
    return found
