"""The tests. What must be set before torch is imported is set here."""

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
    """Without source lines, for which Python looks through all modules at each frame:
    dynaconf asks for the stack whenever a project is opened."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        code = frame.f_code
        place = code.co_filename, frame.f_lineno, code.co_name, None, None
        found.append(inspect.FrameInfo(frame, *place))
        frame = frame.f_back
    return found


inspect.stack = _stack

# A third of the time in which a configuration is read: its interpolations are parsed.
grammar_parser.parse = base.parse = _utils.parse = cache(grammar_parser.parse)
