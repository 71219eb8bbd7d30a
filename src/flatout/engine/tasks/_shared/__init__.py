"""Losses, metrics and label handling shared by several tasks."""
