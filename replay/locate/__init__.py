"""Find the operators where two executions diverge, from each operator's rounding error and from patching."""
