"""Compare two runs and find the first difference."""
