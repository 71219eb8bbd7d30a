"""Processes and what they leave: launching, checkpoints, resuming, faults."""
