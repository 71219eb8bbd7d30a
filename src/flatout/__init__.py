"""flatout: train transformers as fast as the hardware allows."""

__version__ = "0.2.0"
