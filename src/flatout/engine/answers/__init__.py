"""Answers to a user's questions: is a step right, which rows were in it."""
