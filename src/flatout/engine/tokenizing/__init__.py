"""Tokenize texts, and detect outdated token rows by their content keys."""
