"""Diagnose a run: collapse, validity of the comparison, cause and size of the mismatch, next commands."""
