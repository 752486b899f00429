"""Facts read from a trace: series, changes, drops, repeated responses, staleness, and tokens shared by two runs."""
