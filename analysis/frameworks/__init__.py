"""The metrics that RL frameworks log, under their own names and definitions: one module per framework."""
