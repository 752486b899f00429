"""Reproduce the numbers that frameworks log, with their names and definitions: one module per framework."""
