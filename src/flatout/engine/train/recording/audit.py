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
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from flatout.engine.data.row_facts import TEXT_HASH
from flatout.engine.files.atomic_write import write_file, write_text
from flatout.engine.models.trained_rows import row_hashes
from flatout.engine.train.setup.job import TrainJob, cut, decoder, printable

logger = logging.getLogger(__name__)

FILE_NAME = "suspect_rows.parquet"
MISLABELLED, AMBIGUOUS = "probably mislabelled", "ambiguous"
NEVER_LEARNT, TWICE = "never learnt", "duplicate with another label"
SHOWN, CHARACTERS = 50, 200
"""The maximum number of rows on the Markdown page, and of characters per text."""
MOST_SUSPECT = 0.2
"""If more than this fraction of rows is suspect, the model is probably at fault."""


class RowAudit:
    """Statistics of `num_rows` rows, summed over this rank's steps in this session."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        # The last element collects the padding of micro-batches.
        self.sums = torch.zeros(5, num_rows + 1, device=device)
        self.seen, self.right, self.margin, self.steady, self.likely = self.sums
        """The number of passes, of correct predictions, the sum of the margins, the
        number of passes that predicted the same class as the pass before, and the last
        predicted class plus 1 (0 before the first pass)."""

    def add(self, rows: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Update the statistics of the rows `rows` (K,), given logits (K, classes) and
        labels (K,). The row number of padding is `num_rows`."""
        rows, labels = rows[: len(logits)], labels[: len(logits)].clamp(min=0)[:, None]
        own = logits.float().gather(1, labels)
        margin = own - logits.float().scatter(1, labels, -torch.inf).amax(1, True)
        likely = logits.argmax(1)
        right, steady = likely == labels[:, 0], likely + 1 == self.likely[rows]
        found = torch.ones_like(margin[:, 0]), right, margin[:, 0], steady
        self.sums[:4].index_add_(1, rows, torch.stack([one.float() for one in found]))
        self.likely.index_copy_(0, rows, likely + 1.0)

    def gathered(self, world_size: int) -> npt.NDArray[Any]:
        """Return the statistics (5, rows) over all ranks. The last predicted class is
        that of the rank that saw the row most often. All ranks must call this."""
        sums = self.sums[:, :-1].clone()
        if world_size > 1:
            most = sums[0].clone()
            torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
            sums[4] *= sums[0] == most
            torch.distributed.all_reduce(sums[4], op=torch.distributed.ReduceOp.MAX)
            torch.distributed.all_reduce(sums[:4])
        return sums.cpu().numpy()


def write_audit(job: TrainJob, sums: npt.NDArray[Any]) -> None:
    """Write a table of suspect rows, and a page with the most suspect ones, next to the
    metrics file, given the statistics `sums` (5, rows)."""
    table = suspect_rows(job, sums)
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
    body = "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)
    return f"# Suspect rows\n\n{found}; the worst {len(rows)}:\n\n{body}"


def _cell(value: Any) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return cut(printable(text).replace("|", "\\|"), CHARACTERS)


def suspect_rows(job: TrainJob, sums: Any) -> Any:
    """Return a table of the suspect rows, given the statistics `sums` (5, rows)."""
    seen, right, margin, steady, likely = sums
    labels = job.train.labels_of(np.arange(len(job.train)))
    likely, passes = likely.astype(np.int64) - 1, np.maximum(seen, 1)
    score, wrong = -margin / passes, (seen > 0) & (likely != labels)
    # The model prefers another class, mostly the same one in every epoch.
    mislabelled = wrong & (score > 0) & (right <= passes / 2) & (steady >= passes / 2)
    twice = pd.Series(labels).groupby(row_hashes(job.train)).transform("nunique") > 1
    never = (seen > 0) & (right == 0)
    kinds = np.select(
        [twice, mislabelled, never, wrong],
        [TWICE, MISLABELLED, NEVER_LEARNT, AMBIGUOUS],
        default="",
    )
    rows = np.flatnonzero(kinds != "")
    rows = rows[np.argsort(-score[rows], kind="stable")]
    decode, names = decoder(job), np.array([*job.label_names, None])  # -1 gives None
    texts = [job.train.readable(row, decode) for row in rows.tolist()]
    columns = {
        "row": rows,
        "kind": pa.array(kinds[rows], pa.string()),
        "text": pa.array(texts, pa.string()),
        "label": pa.array(names[labels[rows]], pa.string()),
        "likely_label": pa.array(names[likely[rows]], pa.string()),
        "score": score[rows],
        "passes": seen[rows].astype(np.int64),
    }
    if TEXT_HASH in job.train.column_names:
        columns[TEXT_HASH] = job.train.table.column(TEXT_HASH).take(pa.array(rows))
    return pa.table(columns)
