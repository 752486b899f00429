"""What a trace is."""
