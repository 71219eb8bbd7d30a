"""Common base of the LSTM families."""

from __future__ import annotations

from flatout.engine.families._family import Family, Schedule


class Recurrent(Family):
    """LSTMs without attention; their layers are kernels of cuDNN or oneDNN already."""

    attends = False
    schedule = Schedule(compiles=False, records_padded=True, launches_by_place=True)
