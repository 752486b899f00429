"""Search for a batch in which two executions give different bits. The core does not import this package."""
