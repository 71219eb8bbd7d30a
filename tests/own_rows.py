"""Custom rows: sounds that are stored with 8 bits per value, and a volume per sound."""

from flatout.engine.rows.arrays import ArrayRows
from flatout.engine.rows.rows import values_in


class Waveforms(ArrayRows):
    kind = "waveforms"
    column = "waveform"

    def stored(self, batch):
        return values_in(batch.column("waveform")), values_in(batch.column("volume"))

    def inputs(self, stored, rows):
        waveforms, volumes = stored
        return waveforms[rows] * volumes[rows, None]
