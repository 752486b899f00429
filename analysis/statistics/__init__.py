"""What is inferred from a run: intervals of its numbers."""
