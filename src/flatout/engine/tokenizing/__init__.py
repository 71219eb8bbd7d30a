"""Converts texts to tokens, with keys that detect outdated token rows."""
