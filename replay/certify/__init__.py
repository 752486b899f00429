"""Search for a batch in which two executions give different bits. Nothing of the core imports this."""
