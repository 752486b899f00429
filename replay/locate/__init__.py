"""Locate the operators where two executions of recorded sequences diverge, from their own errors and by patching."""
