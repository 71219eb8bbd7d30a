"""The training loop, with its setup, logging and checkpointing.

| question | code |
|---|---|
| Which rows does a step use? | `batches/global_batches.py`: `permute`, `Planner` |
| Where is the loss divided? | `step.py`: `Stepper._forward_backward` |
| Where are gradients clipped? | `optimizer.py`: `Updater` |
| What decides `compile: auto`? | `setup/acceleration.py`: `choose_compile_and_graphs` |
| What predicts the memory of a step? | `setup/memory_fit.py`: `fit` |
| What makes a checkpoint atomic? | `checkpoints/checkpoint_folder.py` |
| What happens if a rank dies? | `launch/supervisor.py`: `Attempt.run` |
| How do metrics reach MLflow? | `recording/metrics_file.py`, then `flatout.tracking` |
"""
