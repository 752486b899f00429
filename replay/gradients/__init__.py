"""Recompute the gradients of recorded steps, as recorded and with changes."""
