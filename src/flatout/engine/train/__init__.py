"""The training loop, with its setup, logging and checkpointing.

| question | place |
|---|---|
| Which rows does a step use? | `batches/global_batches.py`: `permute`, `Planner` |
| What is the loss divided by? | `step.py`: `Stepper._loss_divisor` |
| Where are gradients clipped? | `optimizer.py`: `Updater` |
| What decides `compile: auto`? | `setup/compile_choice.py`: `choose_compilation` |
| What makes a checkpoint atomic? | `checkpoint_folder.py`: `write_checkpoint` |
| How do metrics reach MLflow? | `recording/metrics_file.py`, then `flatout.tracking` |
"""
