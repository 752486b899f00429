"""Where two executions of recorded sequences part: operators, the errors they introduce, and proof by patching."""
