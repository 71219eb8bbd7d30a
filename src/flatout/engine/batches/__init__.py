"""Which rows make a step, and how they get to the device.

`global_batches.py` draws the rows of a step, and its `Planner` cuts them into micro-
batches for the ranks. `collation.py` lays these out as tensors. `loader.py` hands steps
on, made by workers that write to the memory of `ring.py`.
"""
