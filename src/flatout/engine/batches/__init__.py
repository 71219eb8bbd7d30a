"""Rows of each step, and their way to the device.

`global_batches.py` draws the rows of a step, and its `Planner` cuts them into micro-
batches for the ranks. `collation.py` arranges these as tensors. `loader.py` yields the
steps, which workers write to the memory of `ring.py`.
"""
