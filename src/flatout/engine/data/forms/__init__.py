"""Rows with more than one text column and one label column."""
