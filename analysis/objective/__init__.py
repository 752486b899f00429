"""Measure how the mismatch changes a run's training objective."""
