"""Measure how the mismatch changes the objective that a run optimizes."""
