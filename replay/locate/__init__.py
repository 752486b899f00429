"""Find the operators where two executions diverge, from their own errors and by patching."""
