"""Facts read from a trace: series, changes, drops, repeated responses, staleness, tokens shared by two runs."""
