"""The numbers that frameworks log, under their own names and definitions: one module per framework."""
