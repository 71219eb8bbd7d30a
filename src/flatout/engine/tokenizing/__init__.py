"""Tokenizes texts, and detects outdated token rows by their content keys."""
