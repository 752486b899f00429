"""Batch-invariant forward passes: batch, padding and mode never change a bit of a token's result."""
