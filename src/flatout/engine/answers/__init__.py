"""Tools that check whether a training step is correct, and list the rows of a step."""
