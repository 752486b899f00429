"""Series of a run: when each changed, and which changed first."""
