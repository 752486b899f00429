"""Series of a run: when each changed, which changed first, and what a learning-rate schedule would have done."""
