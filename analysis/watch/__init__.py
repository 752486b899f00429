"""Watch a run while it is being recorded."""
