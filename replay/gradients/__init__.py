"""Gradients of recorded steps, as recorded and with changes."""
