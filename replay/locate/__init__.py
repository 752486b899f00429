"""Locate the operators where two executions of recorded sequences diverge, from operators' own errors and by
patching."""
