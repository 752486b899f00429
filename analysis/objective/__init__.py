"""Measure how the mismatch affects the objective that a run was trained on."""
