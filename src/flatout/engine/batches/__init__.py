"""Build the batch of each step and move it to the device.

`global_batches.py` chooses the rows of a step, and its `Planner` splits them into
micro-batches for the ranks. `collation.py` converts rows to tensors. `loader.py` yields
the batches, which worker processes may write to the shared memory of `ring.py`.
"""
