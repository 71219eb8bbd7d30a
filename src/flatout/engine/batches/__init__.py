"""Build the batch of each step and move it to the device.

`global_batches.py` draws the rows of a step, and its `Planner` splits them into micro-
batches for the ranks. `collation.py` converts them to tensors. `loader.py` yields the
steps, which worker processes may write to the shared memory of `ring.py`.
"""
