"""Watch a run while it is recorded: count, remember, judge and draw."""
