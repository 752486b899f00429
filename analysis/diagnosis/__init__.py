"""Diagnose a run: collapse, comparison, mismatch, and next commands."""
