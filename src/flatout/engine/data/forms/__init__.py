"""Rows that are more than a text and a label in a column each."""
