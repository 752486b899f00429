"""Diagnose a run: its collapse, the validity of the comparison, the mismatch, and the next commands."""
