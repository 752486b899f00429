"""Merge the files of many writers into fewer ones, ordered by step."""
