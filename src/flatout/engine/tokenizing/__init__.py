"""Texts to tokens, keyed so that they are never stale."""
