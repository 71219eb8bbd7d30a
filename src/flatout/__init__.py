"""flatout: train transformers as fast as the hardware allows, with true metrics."""

__version__ = "0.2.0"
