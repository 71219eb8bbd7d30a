"""flatout: train transformers as fast as the hardware allows, and measure honestly."""

__version__ = "0.2.0"
