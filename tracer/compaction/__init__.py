"""Merge the files of many writers into a few, ordered by step."""
