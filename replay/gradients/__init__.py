"""Gradients of recorded steps, as they were taken and as they would have been otherwise."""
