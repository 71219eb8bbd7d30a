"""Parts that several tasks share: losses, metrics, lists of labels."""
