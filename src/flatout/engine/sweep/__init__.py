"""Hyperparameter sweeps: train with many combinations of settings and pick the best."""
