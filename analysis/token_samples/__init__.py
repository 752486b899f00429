"""Sequences chosen from a trace, token by token, with their text."""
