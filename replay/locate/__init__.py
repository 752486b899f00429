"""Find the operators where two executions diverge, by bounding rounding errors and by patching operators."""
