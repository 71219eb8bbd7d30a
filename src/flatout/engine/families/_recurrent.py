"""Common base of the LSTM families."""

from __future__ import annotations

import torch

from flatout.engine.families._family import Family, Schedule


class Recurrent(Family):
    """LSTMs without attention; their layers are kernels of cuDNN or oneDNN already."""

    attends = False
    schedule = Schedule(compiles=False, records_padded=True, launches_by_place=True)

    def precision_fault(self, precision: str, device_type: str) -> str | None:
        """Report bf16 on a CPU without AVX-512, for which oneDNN has no LSTM."""
        supported = torch.ops.mkldnn._is_mkldnn_bf16_supported
        if (precision, device_type) != ("bf16", "cpu") or supported():
            return None
        return "LSTMs have no bf16 on this CPU, which lacks AVX-512; set auto or fp32"
