"""Answers to users' questions: is a step correct, and which rows does it train on?"""
