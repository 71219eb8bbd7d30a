"""The tests. This module sets what must be set before torch is imported."""

import inspect
import os
import sys
from functools import cache

from omegaconf import _utils, base, grammar_parser

os.environ.update(
    DO_NOT_TRACK="1",
    MLFLOW_DISABLE_TELEMETRY="true",
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    # There is a test process for each core.
    OMP_NUM_THREADS="1",
    OMP_WAIT_POLICY="PASSIVE",
    TORCHINDUCTOR_COMPILE_THREADS="1",
)


def _stack(context: int = 0) -> list[inspect.FrameInfo]:
    """Return the call stack without source lines. dynaconf requests the stack whenever
    a project is opened, and finding source lines is slow."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        code = frame.f_code
        place = code.co_filename, frame.f_lineno, code.co_name, None, None
        found.append(inspect.FrameInfo(frame, *place))
        frame = frame.f_back
    return found


inspect.stack = _stack

# Caching parsed interpolations saves a third of the time for reading a configuration.
grammar_parser.parse = base.parse = _utils.parse = cache(grammar_parser.parse)
