"""Search for a batch on which two executions differ bitwise. The rest of replay does not import this package."""
