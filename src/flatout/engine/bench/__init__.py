"""Measure settings, judge what bounds them, choose."""
