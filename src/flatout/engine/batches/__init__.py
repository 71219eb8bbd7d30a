"""Build the batch of each step and move it to the device.

`global_batches.py` chooses the rows of a step, and its `Planner` splits them into
micro-batches for the ranks. `collation.py` converts rows to tensors. `loader.py` loads
the batches. Its worker processes can use the shared memory of `ring.py`.
"""
