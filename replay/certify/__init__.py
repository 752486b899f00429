"""Search for a batch in which two executions give different bits. The rest of replay does not import this package."""
