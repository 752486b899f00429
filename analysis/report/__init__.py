"""Reports on runs, each in one file."""
