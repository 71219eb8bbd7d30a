"""Converts raw samples of a fixed shape, numbers or images, to rows in Arrow."""
