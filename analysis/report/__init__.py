"""Single-file reports on runs, short enough to read in a minute."""
