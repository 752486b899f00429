"""Find the operators where two executions of recorded sequences diverge, by their own errors and by patching."""
