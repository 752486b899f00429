"""What a trace shows: series, changes, drops, repeated responses, staleness, and what two runs share."""
