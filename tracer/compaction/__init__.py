"""Merge many writers' files into a few, ordered by step."""
