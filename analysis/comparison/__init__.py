"""Compare two runs and find what differs first."""
