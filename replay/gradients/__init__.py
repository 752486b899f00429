"""Recompute recorded gradients with and without changes."""
