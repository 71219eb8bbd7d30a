"""Encode rows on a Ray cluster, with one Ray task per part of the rows."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers

from flatout import __version__
from flatout.engine.machine.environment import tokenizer_parallelism
from flatout.engine.parameters.faults import first_line
from flatout.engine.tokenizing.encoders.encoded import Encoded, TokensError
from flatout.engine.tokenizing.encoders.encoder import (
    EncodeOptions,
    RowEncoder,
    row_encoder,
)
from flatout.engine.tokenizing.tokenizer import TokenizerFile

logger = logging.getLogger(__name__)

RETRIES = 20
"""Maximum number of times that a part of the rows is retried if its worker is
killed."""
AHEAD = 2
"""Number of parts in progress per CPU of the cluster."""
TELL_S = 30.0
VERSIONS = {"flatout": __version__, "tokenizers": tokenizers.__version__}

Files = tuple[tuple[str, bytes], ...]
"""Names and contents of a tokenizer's files."""


def encode_on_ray(
    parts: Iterator[tuple[Any, int]], tokenizer: TokenizerFile, options: EncodeOptions
) -> Iterator[Encoded]:
    """Yield the tokens of each part, in order. A part is a table of rows together with
    the number of its first row. Raises TokensError if Ray fails or rows are invalid."""
    ray = _connected()
    encode = ray.remote(max_retries=RETRIES)(encode_part)
    paths = sorted(path for path in tokenizer.folder.iterdir() if path.is_file())
    files = ray.put(tuple((path.name, path.read_bytes()) for path in paths))
    most = AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
    waiting: deque[Any] = deque()
    rows, told_s = 0, time.monotonic()
    try:
        for part in parts:
            waiting.append(encode.remote(files, options, VERSIONS, *part))
            if len(waiting) < most:
                continue
            yield ray.get(waiting.popleft())
            rows += part[0].num_rows
            if time.monotonic() - told_s > TELL_S:
                told_s = time.monotonic()
                logger.info("%s rows are encoded", f"{rows:,}")
        while waiting:
            yield ray.get(waiting.popleft())
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        if isinstance(cause, TokensError):
            raise cause from None
        raise _fault(cause) from error


def encode_part(
    files: Files, options: EncodeOptions, wanted: dict[str, str], table: Any, start: int
) -> Encoded:
    """Encode the rows of `table` on a worker. `start` is the number of the first row.
    Raises TokensError if the package versions of the worker differ from `wanted`."""
    if wanted != VERSIONS:
        raise TokensError(
            f"tokenize.engine: a worker of the Ray cluster has {VERSIONS}, and this "
            f"process {wanted}: install the same on all machines"
        )
    with tokenizer_parallelism(False):  # Ray gives each task one core.
        return _encoder(files, options)(table, start)


@cache
def _encoder(files: Files, options: EncodeOptions) -> RowEncoder:
    with TemporaryDirectory() as folder:
        for name, content in files:
            Path(folder, name).write_bytes(content)
        return row_encoder(TokenizerFile(Path(folder)), options)


def _connected() -> Any:
    """Return the ray module, connected to the cluster at RAY_ADDRESS or a local one."""
    try:
        import ray

        if not ray.is_initialized():
            ray.init(log_to_driver=False, logging_level=logging.WARNING)
    except (ImportError, RuntimeError, OSError, ValueError) as error:
        raise _fault(error) from error
    return ray


def _fault(error: BaseException) -> TokensError:
    return TokensError(
        f"tokenize.engine: Ray cannot be used ({type(error).__name__}: "
        f"{first_line(error)}). It needs the extra (pip install 'flatout[ray]') and "
        "flatout in the same Python on all machines, and RAY_ADDRESS of a cluster that "
        "runs; or set tokenize.engine: local"
    )
